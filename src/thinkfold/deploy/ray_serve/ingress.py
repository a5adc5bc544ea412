"""The door: the server's app as a Serve deployment, over the engine of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from thinkfold.deploy.fleet.client import FleetClient
from thinkfold.deploy.fleet.config import Fleet
from thinkfold.deploy.fleet.engine import FleetEngine, start_fleet
from thinkfold.deploy.fleet.metrics import FleetCollector
from thinkfold.deploy.ray_serve.below import BelowPrefix
from thinkfold.deploy.ray_serve.links import Finder
from thinkfold.errors import EngineDeadError
from thinkfold.server.access.gate import Access
from thinkfold.server.app import build_app
from thinkfold.server.contract import EngineSlot
from thinkfold.server.prefixes import WarmPrefix, warm
from thinkfold.server.state import ServerOptions

Services = Callable[[], tuple[ServerOptions, Access, Sequence[WarmPrefix]]]


class Ingress:
    """A deployment's class. `services` reads what the server goes by where this runs: secrets travel with nobody.

    There is one: sessions, stored responses and limits of keys are in its memory. `pools` are the deployments behind
    it, which Serve starts with it.
    """

    def __init__(self, fleet: Fleet, services: Services, *pools: Any) -> None:
        self._app = _build(fleet, services)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return BelowPrefix(self._app)

    async def check_health(self) -> None:
        """Raises for an engine that has died; Serve then starts another ingress.

        Serve asks for the first time before it sends requests here: the answer waits for the first replica.
        """
        slot: EngineSlot = self._app.state.thinkfold.slot
        engine = await slot.loaded()
        if not engine.health().alive:
            raise EngineDeadError(engine.health().reason)


def _build(fleet: Fleet, services: Services) -> FastAPI:
    options, access, prefixes = services()

    def seek(client: FleetClient) -> Callable[[], Any]:
        return Finder(fleet.name, fleet.pools, client).close

    async def start() -> FleetEngine:
        engine = await start_fleet(fleet, seek)
        try:
            await warm(engine, prefixes)
        except BaseException:
            await engine.stop()
            raise
        app.state.thinkfold.metrics.registry.register(FleetCollector(engine.fleet))
        return engine

    app = build_app(start=start, options=options, access=access)
    return app
