"""The engine that the server sees: AsyncEngine over a fleet, with limits and queues of each pool's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.client import FleetClient, whole
from thinkfold.deploy.fleet.config import Fleet
from thinkfold.deploy.fleet.pools import PoolState
from thinkfold.deploy.fleet.router import ROUTERS
from thinkfold.engine.async_engine import AsyncEngine, Health
from thinkfold.engine.language import Language
from thinkfold.engine.limits import Granter
from thinkfold.engine.messages import EngineStats, Event
from thinkfold.types import Service

Seek = Callable[[FleetClient], Callable[[], Awaitable[None]]]


async def start_fleet(fleet: Fleet, seek: Seek) -> FleetEngine:
    """The engine over a fleet, once its first replica is ready.

    `seek` finds replicas and tells the client of them until what it returns is called. Raises ParameterError and
    EngineDeadError as AsyncEngine does.
    """
    clients: list[FleetClient] = []

    def connect(language: Language, on_event: Callable[[Event], None]) -> FleetClient:
        make_router = ROUTERS[fleet.routing]
        pools = {name: PoolState(name, pool.engine, make_router()) for name, pool in fleet.pools.items()}

        async def close() -> None:
            await end()

        client = FleetClient(pools, fleet.default, on_event, close=close)
        end = seek(client)
        clients.append(client)
        return client

    engine = await FleetEngine.start(front_config(fleet), connect=connect)
    engine.fleet = clients[0]
    return engine


def front_config(fleet: Fleet) -> EngineConfig:
    """What the door goes by: the default pool's settings, and as many requests as all replicas may take."""
    pools = fleet.pools.values()
    return replace(
        fleet.pools[fleet.default].engine,
        max_num_seqs=sum(pool.engine.max_num_seqs * pool.replicas.max for pool in pools),
        max_waiting=sum(pool.engine.max_waiting * pool.replicas.max for pool in pools),
    )


class FleetEngine(AsyncEngine):
    """Build it with `start_fleet`."""

    fleet: FleetClient

    def stats(self) -> EngineStats:
        """Of all cores together."""
        self._stats = self.fleet.stats()
        return super().stats()

    def health(self) -> Health:
        """Not ready while a pool has no replica: requests of its tier wait."""
        found = super().health()
        if found.ready and self.fleet.trouble:
            return Health(alive=True, ready=False, reason=self.fleet.trouble)
        return found

    def _check_queue(self, branches: int, service: Service | None = None) -> None:
        super()._check_queue(branches)
        if service is not None:
            self.fleet.pool_of(service.tier.name).check_room(branches)

    def _granter_of(self, service: Service) -> Granter:
        """What the largest replica of the pool can hold; before its first one is ready, of any."""
        pool = self.fleet.pool_of(service.tier.name)
        models = [replica.model for replica in pool.replicas.values()]
        return self._new_granter(whole(models)) if models else super()._granter_of(service)
