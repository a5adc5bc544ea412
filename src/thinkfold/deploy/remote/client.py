"""A core that is somewhere else: takes the engine's commands, sends its events, and works by HTTP.

Everything happens on the caller's event loop; nothing blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote.choice import Line
from thinkfold.deploy.remote.http import Api, Remote
from thinkfold.deploy.remote.orders import carry_out
from thinkfold.deploy.remote.probing import MODELS, find_dialect
from thinkfold.deploy.remote.request import Desk, RemoteRequest
from thinkfold.deploy.remote.shape import model_info
from thinkfold.deploy.remote.tokens import TokenReader
from thinkfold.deploy.remote.turns import Turns
from thinkfold.engine.commands import Answer, Order
from thinkfold.engine.language import Language
from thinkfold.engine.messages import Abort, Command, Dead, EngineStats, Event, News, Ready, Stop
from thinkfold.errors import ParameterError, RemoteError, ThinkfoldError
from thinkfold.types import EngineRequest, RequestOutput

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_CHECK_S = 5.0
_JOIN_S = 10.0


class RemoteClient:
    """A `CoreClient`. `trouble` says why the server cannot be reached now, empty while it can."""

    def __init__(
        self, remote: Remote, config: EngineConfig, language: Language, on_event: Callable[[Event], None]
    ) -> None:
        self._remote, self._config, self._language, self._on_event = remote, config, language, on_event
        self._loop = asyncio.get_running_loop()
        self._api = Api(remote)
        self._requests: dict[str, RemoteRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats = EngineStats()
        self._reasons: Counter[str] = Counter()
        self._thinking_reasons: Counter[str] = Counter()
        self._desk: Desk | None = None
        self.trouble = ""
        self._main = asyncio.create_task(self._run())

    @property
    def line(self) -> Line:
        """How to speak to the server; known once `Ready` was sent."""
        assert self._desk is not None, "the engine has started"
        return self._desk.line

    def send(self, command: Command) -> None:
        """As a core takes it; may only be called on the loop."""
        if isinstance(command, EngineRequest):
            assert self._desk is not None, "the engine has started"
            running = self._requests[command.request_id] = RemoteRequest(self._desk, command)
            self._spawn(self._follow(running))
        elif isinstance(command, Abort):
            running = self._requests.get(command.request_id)
            if running is not None:
                running.cancel([choice for choice in running.choices if not choice.ended])
        elif isinstance(command, Order):
            self._spawn(self._answer(command))
        elif isinstance(command, Stop):
            self._main.cancel()

    def stop(self) -> None:
        """Close every stream and wait for it; to be called off the loop."""
        with contextlib.suppress(RuntimeError, TimeoutError):  # the loop has closed already, or hangs
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_JOIN_S)

    async def _end(self) -> None:
        self._main.cancel()
        await asyncio.wait({self._main})

    async def _run(self) -> None:
        """Find out what the server can, then look after it until the end; the last event is always `Dead`."""
        last: Dead = Dead("")
        try:
            dialect = await find_dialect(self._api, self._remote, self._language, self._config)
            line = Line(self._api, dialect, TokenReader(self._language), self._language)
            turns = Turns(self._config.max_num_seqs if dialect.parallel else 1)
            model = model_info(self._config, self._language, dialect)
            self._desk = Desk(line, turns, model.page_bytes, time.monotonic, self._tell, self._drawing)
            self._on_event(Ready(model))
            await self._look_after()
        except asyncio.CancelledError:
            pass
        except ParameterError as error:
            last = Dead(str(error), error)
        except RemoteError as error:
            last = Dead(str(error), ParameterError("base_url", str(error)))
        except Exception as error:
            logger.exception("the remote client has failed")
            last = Dead(f"{type(error).__name__}: {error}")
        await self._close()
        self._on_event(last)

    async def _look_after(self) -> None:
        """Signs of life, and whether the server can be reached.

        It is not asked while it works: one with a single slot would have to stop for that.
        """
        checked, check = time.monotonic(), None
        while True:
            await asyncio.sleep(_TICK_S)
            for running in list(self._requests.values()):
                running.tick()
            idle = not self._requests and time.monotonic() - checked > _CHECK_S
            if (self.trouble or idle) and (check is None or check.done()):
                check, checked = self._spawn(self._check()), time.monotonic()
            self._post([])

    async def _check(self) -> None:
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._api.get(MODELS)
            self.trouble = ""
        except TimeoutError:
            pass  # somebody else's work, maybe: whoever asks for a completion will see
        except ThinkfoldError as error:
            self.trouble = str(error)

    async def _close(self) -> None:
        running = list(self._requests.values())
        for each in running:
            each.cancel([choice for choice in each.choices if not choice.ended])
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(each.ended() for each in running), *self._tasks, return_exceptions=True)
        await self._api.close()

    async def _follow(self, running: RemoteRequest) -> None:
        """Until nothing of a request runs any more."""
        try:
            await running.ended()
        finally:
            for choice in running.choices:
                if isinstance(choice.error, RemoteError) and choice.error.unreachable:
                    self.trouble = str(choice.error)
            if self._requests.get(running.request.request_id) is running:
                del self._requests[running.request.request_id]

    async def _answer(self, order: Order) -> None:
        assert self._desk is not None, "the engine has started"
        try:
            answer = Answer(order.call, await carry_out(self._desk, self._requests, order))
        except ThinkfoldError as error:
            answer = Answer(order.call, error=error)
        self._post([], [answer])

    def _tell(self, output: RequestOutput) -> None:
        self._stats.steps += 1
        for news in output.outputs:
            self._stats.generated_tokens += len(news.token_ids)
            if news.finish_reason is not None:
                self._reasons[str(news.finish_reason)] += 1
                if news.thinking_end_reason is not None:
                    self._thinking_reasons[str(news.thinking_end_reason)] += 1
        if output.finished:
            self._stats.add(output.costs)
            self._stats.discarded_tokens += output.costs.discarded_tokens
            self._stats.probe_tokens += output.costs.probe_tokens
            self._stats.prefix_queried_tokens += output.costs.prompt_tokens
            self._stats.prefix_hit_tokens += output.costs.cached_tokens
        self._post([output])

    def _post(self, outputs: list[RequestOutput], answers: list[Answer] | None = None) -> None:
        """The engine hears of it after the current callback: it may be in the middle of a command."""
        stats, desk = self._stats, self._desk
        stats.running = sum(
            not choice.ended and choice.begun for each in self._requests.values() for choice in each.choices
        )
        stats.waiting = 0 if desk is None else desk.turns.waiting
        stats.requests_by_reason, stats.thinking_by_reason = dict(self._reasons), dict(self._thinking_reasons)
        self._loop.call_soon(self._on_event, News(outputs, stats, answers or []))

    def _drawing(self) -> int:
        return sum(choice.drawing for each in self._requests.values() for choice in each.choices)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
