"""An application of Pebble replicas on a Ray of this machine, and how tests look at it."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import openai

from thinkfold.cli.deploy import deployed, services
from thinkfold.cli.fleet_settings import parse_deployment

PATIENCE_S = 120.0
PREFIX = "/pebble"
CONFIG = {
    "engine": {"model": "pebble", "max_model_len": 4096, "max_num_seqs": 8, "kv_cache_bytes": 32 * 1024 * 1024},
    "default": "quick",
    "pools": {
        "quick": {"budget": 1024, "replicas": 2, "cpus": 0.1, "drain_s": 100},
        "deep": {
            "budget": 2048,
            "replicas": {"min": 1, "max": 3, "target": 0.6, "up_delay_s": 0.0, "down_delay_s": 2.0},
            "cpus": 0.1,
            "drain_s": 60,
            "engine": {"kv_cache_bytes": 16 * 1024 * 1024},
        },
    },
}


@dataclass(frozen=True, slots=True)
class Cluster:
    url: str

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key="unused", max_retries=0, timeout=PATIENCE_S)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url.removesuffix("/v1"), timeout=PATIENCE_S)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples that have these labels."""
        async with self.http() as http:
            text = (await http.get("/metrics")).text
        samples = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in samples if all(each in found for each in wanted))

    async def open_replicas(self, pool: str) -> int:
        return int(await self.metric("thinkfold_pool_replicas", pool=pool, state="open"))

    async def until_open(self, pool: str, wanted: Callable[[int], bool]) -> None:
        """Wait until the number of a pool's replicas is as it should be."""
        until = time.monotonic() + PATIENCE_S
        while not wanted(found := await self.open_replicas(pool)):
            assert time.monotonic() < until, f"{pool} has {found} replicas"
            await asyncio.sleep(0.25)

    def cores(self, pool: str) -> list[str]:
        """Names of a pool's cores."""
        from ray.util import list_named_actors

        return sorted(a["name"] for a in list_named_actors(True) if a["name"].startswith(f"thinkfold/{pool}/"))

    def kill(self, core: str) -> None:
        """End a core's process at once."""
        import ray

        ray.kill(ray.get_actor(core, namespace="thinkfold"))

    def upgrade(self, **engine: Any) -> None:
        """Deploy the application again with other settings of the engine, and wait until it runs."""
        from ray import serve

        from thinkfold.deploy.ray_serve.app import build_application

        port = int(self.url.split(":")[2].partition("/")[0])
        changed = {**CONFIG, "engine": {**CONFIG["engine"], **engine}, "port": port, "prefix": PREFIX}
        deployment = parse_deployment(changed)
        application = build_application(deployment.fleet, partial(services, deployment))
        serve.run(application, name=deployment.fleet.name, route_prefix=PREFIX)

    def kill_ingress(self) -> None:
        """End the process of the door."""
        import ray
        from ray.util import list_named_actors

        name = next(a["name"] for a in list_named_actors(True) if "#ingress#" in a["name"])
        ray.kill(ray.get_actor(name, namespace="serve"))

    async def until_ready(self) -> None:
        """Wait until the door and all pools are there."""
        until = time.monotonic() + PATIENCE_S
        async with self.http() as http:
            while True:
                with suppress(httpx.TransportError):
                    if (await http.get("/ready")).status_code == 200:
                        return
                assert time.monotonic() < until, "the application does not become ready"
                await asyncio.sleep(0.25)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start it, and end it with all of its processes."""
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    deployment = parse_deployment({**CONFIG, "port": port, "prefix": PREFIX})
    with deployed([deployment]):
        found = Cluster(deployment.fleet.url)
        asyncio.run(found.until_ready())
        asyncio.run(found.until_open("quick", lambda count: count == 2))
        yield found
