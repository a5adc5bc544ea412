"""A core for whoever reads it from elsewhere: takes its commands, keeps its events until they are fetched.

Becomes an actor of Ray; knows nothing of Ray itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.demand import Demand, Need
from thinkfold.engine.build import build_core
from thinkfold.engine.client import Build, CoreClient, local_client
from thinkfold.engine.commands import Extend
from thinkfold.engine.messages import Abort, Command, Dead, Event, News, Ready
from thinkfold.errors import EngineDeadError
from thinkfold.types import EngineRequest, RequestOutput

_CHECK_S = 0.05
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class Draining:
    """The core is to go: it takes nothing new, and what has begun may end."""


Told = Event | Draining


class CoreHost:
    """Starts the core of `config` when it is first waited for. There is one reader at a time, the latest."""

    def __init__(self, config: EngineConfig, build: Build = build_core) -> None:
        self._config = config
        self._demand = Demand()
        self._needs: dict[str, Need] = {}  # of what runs
        self._starting: dict[int, str] = {}  # calls that are to start a request from a handle
        self._told: list[Told] = []  # since the reader has fetched last
        self._news = asyncio.Event()
        self._reader = ""
        self._ready: Ready | None = None
        self._dead: Dead | None = None
        self._draining = False
        self._last_event = time.monotonic()
        self._build = build
        self._client: CoreClient | None = None

    async def loaded(self) -> None:
        """Wait for the model. Raises what was wrong with it."""
        if self._client is None:
            self._client = local_client(self._build, self._config, self._on_event)
        while self._ready is None and self._dead is None:
            await asyncio.sleep(_CHECK_S)
        self.check()

    async def events(self, reader: str) -> AsyncGenerator[list[Told], None]:
        """All that the core tells from now on, a list at a time, beginning with `Ready`; ends with its end.

        What runs for an earlier reader is aborted: nobody will hear of it.
        """
        await self.loaded()
        assert self._ready is not None, "it is loaded"
        for name in list(self._needs):
            self._core.send(Abort(name))
        self._reader, self._told = reader, []
        self._told += [self._ready, *([Draining()] if self._draining else [])]
        self._news.set()
        while self._reader == reader:
            await self._news.wait()
            self._news.clear()
            if self._reader != reader:
                self._news.set()  # it is for who has come
                return
            told, self._told = self._told, []
            if told:
                yield told
            if self._dead is not None:
                return

    async def send(self, reader: str, commands: Sequence[Command], sent: float) -> None:
        """Commands of the reader, who sent them at `sent` on its clock."""
        if reader != self._reader:
            return  # somebody else reads by now
        late = time.monotonic() - sent  # machines have clocks of their own
        for command in commands:
            if isinstance(command, EngineRequest | Extend):
                if not self._needs:
                    self._last_event = time.monotonic()  # silence counts from the first request after idling
                self._needs[command.request_id] = self._demand.need(command)
                if isinstance(command, Extend):
                    self._starting[command.call] = command.request_id
                self._core.send(replace(command, arrival_time=command.arrival_time + late))
            else:
                self._core.send(command)

    async def load(self) -> dict[str, float]:
        """KV entries that all requests are predicted to hold at their peaks, and those of the pool."""
        capacity = self._ready.model.kv_capacity if self._ready is not None else 0
        return {"kv_peak": sum(map(self._demand.entries, self._needs.values())), "kv_capacity": capacity}

    def check(self) -> None:
        """Raise EngineDeadError for a core that has ended, or that is stuck; ParameterError for a wrong parameter."""
        if self._dead is not None:
            raise self._dead.error or EngineDeadError(self._dead.reason or "the core was stopped")
        silent = time.monotonic() - self._last_event
        if self._needs and silent > self._config.watchdog_s:
            raise EngineDeadError(f"no step has finished for {silent:.0f} s")

    async def health(self) -> None:
        """See `check`."""
        self.check()

    async def drain(self, seconds: float) -> None:
        """Tell the reader that this is the end, let what runs end for so long, and stop."""
        self._draining = True
        self._tell(Draining())
        until = time.monotonic() + seconds
        while self._needs and self._dead is None and time.monotonic() < until:
            await asyncio.sleep(_CHECK_S)
        await asyncio.to_thread(self._core.stop)
        until = time.monotonic() + _LAST_WORDS_S
        while self._told and self._reader and time.monotonic() < until:
            await asyncio.sleep(_CHECK_S)  # the reader fetches the last news, if it is still there

    @property
    def _core(self) -> CoreClient:
        assert self._client is not None, "it is loaded"
        return self._client

    def _on_event(self, event: Event) -> None:
        self._last_event = time.monotonic()
        if isinstance(event, Ready):
            self._ready = event
            return  # a reader gets it first of all
        if isinstance(event, Dead):
            self._dead = event
        elif isinstance(event, News):
            for output in event.outputs:
                self._note(output)
            for answer in event.answers:
                name = self._starting.pop(answer.call, None)
                if name is not None and answer.error is not None:
                    self._needs.pop(name, None)  # it has not begun, and tells no end
        if self._reader:
            self._tell(event)

    def _tell(self, told: Told) -> None:
        self._told.append(told)
        self._news.set()

    def _note(self, output: RequestOutput) -> None:
        need = self._needs.get(output.request_id)
        if need is None:
            return
        self._demand.progress(need, output)
        if output.finished:
            del self._needs[output.request_id]
            self._demand.learn(need, output, self._needs.values())
