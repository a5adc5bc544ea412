# pyright: reportMissingImports=false
"""Finds the cores of an application by their names, and keeps a link to each: a stream of events, batches of commands.

Batches go one after the other: so they arrive in order, and a batch grows while one is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from thinkfold.deploy.fleet.client import FleetClient
from thinkfold.deploy.ray_serve.core_host import Draining, Told
from thinkfold.deploy.ray_serve.replica import NAMESPACE, Whose
from thinkfold.engine.messages import Command, Dead, News, Ready

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_SIGN_S = 2.0  # so often a core hears that somebody reads it


class CoreLink:
    """A `Link` to one core. Tells `fleet` when the core is ready, of its events, and of its end."""

    def __init__(self, name: str, pool: str, fleet: FleetClient) -> None:
        self._name, self._pool = name, pool
        self._fleet = fleet
        self._reader = uuid.uuid4().hex
        self._commands: list[Command] = []
        self._waiting = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def name(self) -> str:
        return self._name

    @property
    def pool(self) -> str:
        return self._pool

    @property
    def ended(self) -> bool:
        """Whether it has told of the core's end."""
        return self._task.done()

    def send(self, command: Command) -> None:
        self._commands.append(command)
        self._waiting.set()

    async def close(self) -> None:
        """Send what is left, and read no more."""
        for _ in range(20):
            if not self._commands:
                break
            await asyncio.sleep(0.05)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Until the core has gone."""
        reason = "it has ended"
        try:
            core: Any = await asyncio.to_thread(ray.get_actor, self._name, namespace=NAMESPACE)
            sender = asyncio.create_task(self._send_all(core))
            try:
                async for batch in core.events.options(num_returns="streaming").remote(self._reader):
                    reason = self._hear(await batch) or reason
            finally:
                sender.cancel()
        except (RayError, ValueError) as error:  # ValueError: it went before it could be asked
            reason = str(error).strip().partition("\n")[0]
        except Exception as error:
            logger.exception("the link to %s has failed", self._name)
            reason = f"{type(error).__name__}: {error}"
        self._fleet.lose(self._name, reason)

    def _hear(self, told: Iterable[Told]) -> str:
        """The reason of the core's end, empty while it lives."""
        for event in told:
            if isinstance(event, Ready):
                self._fleet.join(self, event.model)
            elif isinstance(event, News):
                self._fleet.hear(self._name, event)
            elif isinstance(event, Draining):
                self._fleet.drain(self._name)
            elif isinstance(event, Dead):
                return event.reason
        return ""

    async def _send_all(self, core: Any) -> None:
        with contextlib.suppress(RayError):  # who listens hears of it
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SIGN_S):
                        await self._waiting.wait()
                self._waiting.clear()
                commands, self._commands = self._commands, []
                await core.send.remote(self._reader, commands, time.monotonic())


class Finder:
    """Looks for cores of an application's pools until it is closed."""

    def __init__(self, app: str, pools: Iterable[str], fleet: FleetClient) -> None:
        self._prefixes = {Whose(app, pool).prefix: pool for pool in pools}
        self._fleet = fleet
        self._links: dict[str, CoreLink] = {}
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except RayError as error:  # the head may be away for a while; cores and links live on
                logger.warning("cores cannot be looked for: %s", error)
            self._fleet.tick()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        """Link to cores that are new, and forget links that have told their core's end."""
        actors = cast(list[dict[str, str]], await asyncio.to_thread(list_named_actors, True))
        names = {actor["name"] for actor in actors if actor["namespace"] == NAMESPACE}
        for name in [name for name, link in self._links.items() if link.ended]:
            del self._links[name]  # one that still lives has let go of us: it is linked again
        for name in names - self._links.keys():
            pool = next((pool for prefix, pool in self._prefixes.items() if name.startswith(prefix)), None)
            if pool is not None:
                self._links[name] = CoreLink(name, pool, self._fleet)
