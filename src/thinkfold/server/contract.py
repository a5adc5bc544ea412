"""The engine as the server sees it, and the place where it appears once it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from thinkfold.config import EngineConfig
from thinkfold.engine.messages import EngineStats, ModelInfo
from thinkfold.engine.samples import Question
from thinkfold.errors import EngineDeadError, ThinkfoldError, UnsupportedError
from thinkfold.server.defaults import sampling_defaults
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import (
    ControlParams,
    Decision,
    FoldParams,
    Handle,
    PinnedPrefix,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingParams,
    Until,
)

logger = logging.getLogger(__name__)


class Health(Protocol):
    """`alive`: the engine has not died. `ready`: its steps advance. `reason` says why not."""

    @property
    def alive(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Engine(Protocol):
    """What the server needs of `AsyncEngine`; engines elsewhere may implement it too."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def prompts(self) -> PromptRenderer: ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        thinking: ThinkingParams,
        fold: FoldParams | None = None,
        *,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
        service: Service | None = None,
        control: ControlParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas; the last has `finished`. Closing the iterator aborts the request."""
        ...

    def health(self) -> Health: ...
    def stats(self) -> EngineStats: ...
    async def stop(self) -> None: ...


@runtime_checkable
class Controllable(Protocol):
    """An engine whose running requests take orders (see `engine.controls.Controls`)."""

    def check_owner(self, request_id: str, namespace: tuple[str, ...]) -> None:
        """Raises NotFoundError unless the request runs and is of that namespace."""
        ...

    async def pause(self, request_id: str, choice: int | None = None) -> None: ...
    async def resume(self, request_id: str, choice: int | None = None) -> None: ...
    async def cancel(self, request_id: str, choice: int | None = None, *, keep_partial: bool = True) -> None: ...
    async def end_thinking(self, request_id: str, choice: int | None = None) -> None: ...
    async def set_budget(self, request_id: str, budget: int) -> int | None: ...
    async def inject(self, request_id: str, token_ids: Sequence[int], choice: int | None = None) -> int: ...
    async def fork(self, request_id: str, at: int | None = None, choice: int | None = None) -> Handle: ...
    async def drop(self, handle: str, namespace: tuple[str, ...] = ()) -> None: ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        thinking: ThinkingParams,
        fold: FoldParams | None = None,
        *,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
        until: Until | None = None,
        service: Service | None = None,
        control: ControlParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def extend(
        self,
        handle: str,
        until: Until | None = None,
        *,
        n: int = 1,
        temperature: float | None = None,
        seed: int | None = None,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
    ) -> AsyncGenerator[RequestOutput, None]: ...


@runtime_checkable
class Warmable(Protocol):
    """An engine that computes prefixes before they are asked for (see `engine.controls.Controls`)."""

    async def prefill(
        self,
        name: str,
        token_ids: Sequence[int],
        namespace: tuple[str, ...] = (),
        *,
        owner: str = "",
        idle: bool = False,
        ttl_s: float | None = None,
        session: str = "",
    ) -> PinnedPrefix: ...
    async def pinned(self, owner: str = "") -> list[PinnedPrefix]: ...
    async def unpin(self, name: str, owner: str = "") -> None: ...


@runtime_checkable
class Forgetting(Protocol):
    """An engine that can let go of all that it keeps for somebody (see `engine.controls.Controls`)."""

    async def forget(self, owner: str = "", labels: tuple[str, ...] = (), session: str = "") -> dict[str, int]: ...


@runtime_checkable
class Deciding(Protocol):
    """An engine that can ask several samples and decide between them."""

    def decide(self, question: Question, how: Decision) -> AsyncGenerator[RequestOutput, None]: ...


def deciding(engine: Engine, field: str) -> Deciding:
    """The engine. Raises UnsupportedError where it asks one sample only."""
    if not isinstance(engine, Deciding):
        raise UnsupportedError(field, "this engine cannot decide between samples")
    return engine


class EngineLoadingError(ThinkfoldError):
    """The model is not loaded yet; try again (HTTP 503)."""


class EngineSlot:
    """Holds the engine from the moment it is loaded; before that, the reason why not."""

    def __init__(self, start: Callable[[], Awaitable[Engine]]) -> None:
        self._start = start
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self.sampling_defaults: Mapping[str, float | int] = {}
        self.failure: BaseException | None = None

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def require(self) -> Engine:
        """The engine. Raises EngineLoadingError or EngineDeadError."""
        if self.failure is not None:
            raise EngineDeadError(f"the model could not be loaded: {self.failure}")
        if self._engine is None:
            raise EngineLoadingError("the model is still loading")
        return self._engine

    def begin(self) -> None:
        """Start loading in the background, so that the socket answers meanwhile."""
        self._task = asyncio.create_task(self._load())

    async def loaded(self) -> Engine:
        """Wait for the engine. Raises what loading raised."""
        if self._task is not None:
            await asyncio.shield(self._task)
        if self.failure is not None:
            raise self.failure
        return self.require()

    async def close(self) -> None:
        """Stop loading, or the engine."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._engine is not None:
            await self._engine.stop()

    async def _load(self) -> None:
        try:
            engine = await self._start()
            self.sampling_defaults = await asyncio.to_thread(sampling_defaults, engine.prompts.source)
            self._engine = engine
        except Exception as error:
            if not isinstance(error, ThinkfoldError):
                logger.exception("loading the model failed")
            self.failure = error
