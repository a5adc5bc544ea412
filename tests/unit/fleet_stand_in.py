"""A fleet in one process: scripted cores in threads, each behind a gate that a test can shut, and links that break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from scripted import OPEN_PROMPT, ids, loop, make_engine

from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.client import FleetClient
from thinkfold.deploy.fleet.config import Fleet, Pool, Replicas
from thinkfold.deploy.fleet.engine import FleetEngine, start_fleet
from thinkfold.engine.client import ThreadClient
from thinkfold.engine.messages import Command, EngineStats, Event, ModelInfo, News, Ready
from thinkfold.server.tiers import ServedTier
from thinkfold.types import EngineRequest, Tier


class LocalCore:
    """A link to a core in a thread of this process. `heard` are the names of requests that were sent to it."""

    def __init__(self, name: str, pool: str, fleet: FleetClient, config: EngineConfig, *, shut: bool) -> None:
        self.name, self.pool = name, pool
        self.gate = threading.Event()
        self.shut_after: int | None = None
        if not shut:
            self.gate.set()
        self.heard: list[str] = []
        self.commands: list[Command] = []
        self.stats = EngineStats()
        self._fleet: FleetClient | None = fleet
        self._client = ThreadClient(self._build, config, self._on_event)

    def send(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, EngineRequest):
            self.heard.append(command.request_id)
        self._client.send(command)

    @property
    def waits(self) -> bool:
        """Whether it stands at its gate, or is about to: from now on it tells nothing."""
        return not self.gate.is_set()

    def break_link(self, reason: str = "killed") -> None:
        """The core has gone without a word."""
        fleet, self._fleet = self._fleet, None
        assert fleet is not None
        fleet.lose(self.name, reason)

    async def stop(self) -> None:
        self._fleet = None
        self.gate.set()
        await asyncio.to_thread(self._client.stop)

    def _on_event(self, event: Event) -> None:
        if self._fleet is None:
            return
        if isinstance(event, Ready):
            self._fleet.join(self, event.model)
        elif isinstance(event, News):
            self.stats = event.stats
            self._fleet.hear(self.name, event)
        else:
            self._fleet.lose(self.name, event.reason)

    def _build(self, config: EngineConfig):
        engine = make_engine(max_num_seqs=config.max_num_seqs)
        runner, launch = engine.runner, engine.runner.launch
        runner.scripts["any"] = (loop(), len(ids(OPEN_PROMPT)))

        def gated(plan):
            assert self.gate.wait(20)
            if self.shut_after is not None:
                self.shut_after -= 1
                if self.shut_after == 0:
                    self.gate.clear()
            return launch(plan)

        runner.launch = gated
        return engine.core, ModelInfo("pebble", "qwen3", 1600, 1536, 400, 4, 100, 1600, "qwen3", True, True)


class Cores:
    """Starts and keeps them by name."""

    def __init__(self, fleet: Fleet, client: FleetClient) -> None:
        self._fleet, self._client = fleet, client
        self.all: dict[str, LocalCore] = {}

    def start(self, name: str, pool: str, *, shut: bool = False) -> LocalCore:
        core = LocalCore(name, pool, self._client, self._fleet.pools[pool].engine, shut=shut)
        self.all[name] = core
        return core

    def __getitem__(self, name: str) -> LocalCore:
        return self.all[name]

    def of(self, request_id: str) -> LocalCore:
        """The core that was sent a request last."""
        return next(core for core in reversed(self.all.values()) if request_id in core.heard)

    async def stop(self) -> None:
        for core in self.all.values():
            await core.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; cores are threads, and the machine may be busy."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


CONFIG = EngineConfig(max_num_seqs=2, max_waiting=2, own_process=False, fold_policy="off")


def fleet_of(*names: str, routing="affinity", engine: EngineConfig = CONFIG) -> Fleet:
    pools = {n: Pool(ServedTier(Tier(n, budget=64)), engine, Replicas(1, 3)) for n in names}
    return Fleet(pools, names[0], routing=routing)


@asynccontextmanager
async def running(fleet: Fleet, cores: Mapping[str, str]) -> AsyncIterator[tuple[FleetEngine, Cores]]:
    """An engine over scripted cores, `cores` by their names: their pools."""
    found: list[Cores] = []

    def seek(client: FleetClient):
        found.append(Cores(fleet, client))
        for name, pool in cores.items():
            found[0].start(name, pool)
        return found[0].stop

    engine = await start_fleet(fleet, seek)
    try:
        await until(lambda: sum(len(pool.replicas) for pool in engine.fleet.pools.values()) == len(cores))
        yield engine, found[0]
    finally:
        for core in found[0].all.values():
            core.gate.set()
        await engine.stop()
