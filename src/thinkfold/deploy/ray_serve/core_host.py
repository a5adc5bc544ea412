"""A core for those who read it from elsewhere: takes their commands, keeps its news for each until they are fetched.

Becomes an actor of Ray; knows nothing of Ray itself. There is one reader, the ingress, and while that is replaced
there are two: each hears of its own requests only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.demand import Demand, Need
from thinkfold.engine.build import build_core
from thinkfold.engine.client import Build, CoreClient, local_client
from thinkfold.engine.commands import Answer, Extend, Order
from thinkfold.engine.messages import Abort, Command, Dead, Event, News, Ready
from thinkfold.errors import EngineDeadError
from thinkfold.types import EngineRequest

SILENT_S = 15.0  # after which a reader is taken to have gone; it sends something much more often
_CHECK_S = 0.05
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class Draining:
    """The core is to go: it takes nothing new, and what has begun may end."""


Told = Event | Draining


@dataclass(slots=True, eq=False)
class _Reader:
    heard: float  # when it has sent something last
    told: list[Told] = field(default_factory=list)  # since it has fetched last
    news: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False

    def tell(self, *told: Told) -> None:
        self.told += told
        self.news.set()


@dataclass(slots=True, eq=False)
class _Running:
    reader: _Reader
    need: Need


class CoreHost:
    """Starts the core of `config` when it is first waited for."""

    def __init__(
        self, config: EngineConfig, build: Build = build_core, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._build, self._clock = config, build, clock
        self._client: CoreClient | None = None
        self._demand = Demand()
        self._readers: dict[str, _Reader] = {}
        self._running: dict[str, _Running] = {}
        self._calls: dict[int, tuple[_Reader, Order]] = {}  # readers number theirs alike
        self._numbers = itertools.count()
        self._ready: Ready | None = None
        self._dead: Dead | None = None
        self._draining = False
        self._last_event = clock()

    async def loaded(self) -> None:
        """Wait for the model. Raises what was wrong with it."""
        if self._client is None:
            self._client = local_client(self._build, self._config, self._on_event)
        while self._ready is None and self._dead is None:
            await asyncio.sleep(_CHECK_S)
        self.check()

    async def events(self, name: str) -> AsyncGenerator[list[Told], None]:
        """All that the core tells this reader from now on, a list at a time, beginning with `Ready`.

        Ends with the core, and with the reader when it has been silent for too long.
        """
        await self.loaded()
        assert self._ready is not None, "it is loaded"
        reader = self._readers[name] = _Reader(self._clock())
        reader.tell(self._ready, *([Draining()] if self._draining else []))
        while not reader.gone:
            await reader.news.wait()
            reader.news.clear()
            told, reader.told = reader.told, []
            if told:
                yield told
            if self._dead is not None:
                return

    async def send(self, name: str, commands: Sequence[Command], sent: float) -> None:
        """Commands of a reader, who sent them at `sent` on its clock; none at all are a sign of life.

        Raises EngineDeadError for a reader that has been taken to have gone.
        """
        reader = self._readers.get(name)
        if reader is None:
            raise EngineDeadError("this reader was silent for too long")
        reader.heard = self._clock()
        late = self._clock() - sent  # machines have clocks of their own
        for command in commands:
            self._core.send(self._adopted(reader, command, late))

    async def load(self) -> dict[str, float]:
        """KV entries that all requests are predicted to hold at their peaks, and those of the pool."""
        capacity = self._ready.model.kv_capacity if self._ready is not None else 0
        return {
            "kv_peak": sum(self._demand.entries(each.need) for each in self._running.values()),
            "kv_capacity": capacity,
        }

    def check(self) -> None:
        """Raise EngineDeadError for a core that has ended, or that is stuck; ParameterError for a wrong parameter."""
        if self._dead is not None:
            raise self._dead.error or EngineDeadError(self._dead.reason or "the core was stopped")
        silent = self._clock() - self._last_event
        if self._running and silent > self._config.watchdog_s:
            raise EngineDeadError(f"no step has finished for {silent:.0f} s")

    async def health(self) -> None:
        """See `check`; readers that have gone are let go, and nobody works for them any more."""
        self.check()
        for name, reader in list(self._readers.items()):
            if self._clock() - reader.heard > SILENT_S:
                del self._readers[name]
                reader.gone = True
                reader.news.set()
                for request in [request for request, each in self._running.items() if each.reader is reader]:
                    self._core.send(Abort(request))

    async def drain(self, seconds: float) -> None:
        """Tell all that this is the end, let what runs end for so long, and stop."""
        self._draining = True
        self._tell_all(Draining())
        until = self._clock() + seconds
        while self._running and self._dead is None and self._clock() < until:
            await asyncio.sleep(_CHECK_S)
        await asyncio.to_thread(self._core.stop)
        until = self._clock() + _LAST_WORDS_S
        while any(reader.told for reader in self._readers.values()) and self._clock() < until:
            await asyncio.sleep(_CHECK_S)  # readers fetch the last news, if they are still there

    @property
    def _core(self) -> CoreClient:
        assert self._client is not None, "it is loaded"
        return self._client

    def _adopted(self, reader: _Reader, command: Command, late: float) -> Command:
        """The command as the core gets it: with this machine's time and a number of the call that is nobody else's."""
        if isinstance(command, EngineRequest | Extend):
            if not self._running:
                self._last_event = self._clock()  # silence counts from the first request after idling
            self._running[command.request_id] = _Running(reader, self._demand.need(command))
            command = replace(command, arrival_time=command.arrival_time + late)
        if isinstance(command, Order):
            number = next(self._numbers)
            self._calls[number] = reader, command
            command = replace(command, call=number)
        return command

    def _on_event(self, event: Event) -> None:
        self._last_event = self._clock()
        if isinstance(event, Ready):
            self._ready = event  # each reader gets it first of all
        elif isinstance(event, Dead):
            self._dead = event
            self._tell_all(event)
        else:
            self._share(event)

    def _share(self, news: News) -> None:
        """To each reader what concerns it, and the statistics."""
        parts = {reader: News([], news.stats) for reader in self._readers.values()}
        for answer in news.answers:
            reader, order = self._calls.pop(answer.call)
            if isinstance(order, Extend) and answer.error is not None:
                self._running.pop(order.request_id, None)  # it has not begun, and tells no end
            if reader in parts:
                parts[reader].answers.append(Answer(order.call, answer.value, answer.error))
        for output in news.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            self._demand.progress(running.need, output)
            if output.finished:
                del self._running[output.request_id]
                self._demand.learn(running.need, output, [each.need for each in self._running.values()])
            if running.reader in parts:
                parts[running.reader].outputs.append(output)
        for reader, part in parts.items():
            reader.tell(part)

    def _tell_all(self, told: Told) -> None:
        for reader in self._readers.values():
            reader.tell(told)
