# pyright: reportMissingImports=false
"""A replica as Ray Serve sees it: starts a core in an actor of its own, asks after it, and drains it at the end.

The core is an actor beside the replica, not the replica itself: the ingress speaks with it directly, on a stream that
goes on while Serve already takes the replica away, and in an order that no request queue changes.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import ray

from thinkfold.deploy.fleet.config import Pool
from thinkfold.deploy.ray_serve.core_host import CoreHost

NAMESPACE = "thinkfold"


@dataclass(frozen=True, slots=True)
class Whose:
    """The application and the pool of a core: the beginning of its name."""

    app: str
    pool: str

    @property
    def prefix(self) -> str:
        return f"{self.app}/{self.pool}/"


class Replica:
    """A deployment's class. The core ends with it, however it ends: Ray ends actors with their owner."""

    async def __init__(self, whose: Whose, pool: Pool) -> None:
        self._drain_s = pool.drain_s
        options = {"num_cpus": pool.cpus, "num_gpus": pool.gpus, "max_concurrency": 64}
        name = f"{whose.prefix}{uuid.uuid4().hex[:8]}"
        actor: Any = ray.remote(CoreHost)
        self._core = actor.options(name=name, namespace=NAMESPACE, **options).remote(pool.engine)
        await self._core.loaded.remote()

    async def check_health(self) -> None:
        """Raises for a core that has ended or is stuck; Serve then puts another replica in this one's place."""
        await self._core.health.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.KVPeakPolicy` goes by."""
        return await self._core.load.remote()

    async def __del__(self) -> None:
        """Serve calls it when it takes the replica away."""
        await self._core.drain.remote(self._drain_s)
