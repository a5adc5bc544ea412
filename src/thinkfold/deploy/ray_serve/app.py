# pyright: reportMissingImports=false
"""Puts the parts together: one Serve application of an ingress and its pools."""

from __future__ import annotations

import math
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.deployment import Application

from thinkfold.deploy.fleet.config import Fleet, Pool
from thinkfold.deploy.fleet.engine import front_config
from thinkfold.deploy.ray_serve.ingress import Ingress, Services
from thinkfold.deploy.ray_serve.replica import Replica, Whose
from thinkfold.deploy.ray_serve.scaling import KVPeakPolicy

INGRESS = "ingress"
_ASIDE = 256  # questions about health, metrics and running responses beside those that are answered
_LAST_WORDS_S = 5.0  # for whoever drains to tell its end
_WINDOW_S = 11.0  # of which the highest predicted peak counts; replicas tell theirs every 10 s
_HEALTH_S = 2.0  # after three that fail a replica is replaced


def build_application(fleet: Fleet, services: Services) -> Application:
    """What `serve.run` takes."""
    pools = [_pool(fleet, pool) for pool in fleet.pools.values()]
    front = front_config(fleet)
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        num_replicas=1,
        max_ongoing_requests=front.max_num_seqs + front.max_waiting + _ASIDE,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=max(pool.drain_s for pool in fleet.pools.values()) + _LAST_WORDS_S,
    )
    return ingress.bind(fleet, services, *pools)


def _pool(fleet: Fleet, pool: Pool) -> Application:
    counts = pool.replicas
    policy = AutoscalingPolicy(policy_function=KVPeakPolicy, policy_kwargs={"target": counts.target})
    scaling = AutoscalingConfig(
        min_replicas=counts.min,
        max_replicas=counts.max,
        upscale_delay_s=counts.up_delay_s,
        downscale_delay_s=counts.down_delay_s,
        look_back_period_s=_WINDOW_S,
        aggregation_function="max",
        policy=policy,
    )
    deployment: Any = serve.deployment(
        Replica,
        name=pool.name,
        autoscaling_config=scaling,
        health_check_period_s=_HEALTH_S,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=math.ceil(pool.drain_s) + _LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return deployment.bind(Whose(fleet.name, pool.name), pool)
