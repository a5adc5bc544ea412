"""What `AsyncEngine` offers for a running request: each call is one order to the core and waits for its answer."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from thinkfold.engine.commands import Answer, Cancel, EndThinking, Inject, Order, Pause, Resume, SetBudget
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import ParameterError
from thinkfold.types import ThinkingEndReason


class Controls(ABC):
    """Orders are done between two steps; `choice` None means every choice that has not ended.

    All raise NotFoundError for a request that is not running, and EngineDeadError.
    """

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    @property
    @abstractmethod
    def model(self) -> ModelInfo: ...

    @abstractmethod
    def _send(self, command: Order) -> None: ...

    async def pause(self, request_id: str, choice: int | None = None) -> None:
        """Stop a request with everything it holds. Raises ConflictError if it is paused."""
        await self._ask(Pause(call=self._next(), request_id=request_id, choice=choice))

    async def resume(self, request_id: str, choice: int | None = None) -> None:
        """Go on after `pause`; nothing is lost. Raises ConflictError if it is not paused."""
        await self._ask(Resume(call=self._next(), request_id=request_id, choice=choice))

    async def cancel(self, request_id: str, choice: int | None = None, *, keep_partial: bool = True) -> None:
        """End now, with `finish_reason` abort. Without `keep_partial` all its tokens count as discarded."""
        await self._ask(Cancel(call=self._next(), request_id=request_id, choice=choice, keep_partial=keep_partial))

    async def end_thinking(
        self, request_id: str, choice: int | None = None, *, reason: ThinkingEndReason = ThinkingEndReason.CONTROL
    ) -> None:
        """Close thinking now, as a spent budget does. Raises ConflictError if nobody thinks, UnsupportedError."""
        await self._ask(EndThinking(call=self._next(), request_id=request_id, choice=choice, reason=reason))

    async def set_budget(self, request_id: str, budget: int) -> int | None:
        """Another thinking budget; -1 is no limit. Returns the effective one (None: no limit).

        Raises ParameterError, UnsupportedError, and ConflictError where thinking is off.
        """
        return await self._ask(SetBudget(call=self._next(), request_id=request_id, budget=budget))

    async def inject(self, request_id: str, token_ids: Sequence[int], choice: int | None = None) -> int:
        """Append tokens that the model has not drawn; it goes on behind them. Returns the output tokens so far.

        Waits for the end of a begun character. Raises ParameterError for ids, ConflictError for more than
        the budget or `max_tokens` has left, or if one of several running choices must be named.
        """
        ids = self._checked(token_ids)
        return await self._ask(Inject(call=self._next(), request_id=request_id, choice=choice, token_ids=ids))

    async def _ask(self, order: Order) -> Any:
        future = self._calls[order.call] = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            return await future
        finally:
            self._calls.pop(order.call, None)

    def _hear(self, answers: Iterable[Answer]) -> None:
        """Answers have come from the core."""
        for answer in answers:
            future = self._calls.get(answer.call)
            if future is None or future.done():
                continue
            if answer.error is not None:
                future.set_exception(answer.error)
            else:
                future.set_result(answer.value)

    def _fail_calls(self, error: Exception) -> None:
        """No answer will come any more."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _checked(self, token_ids: Sequence[int], *, empty: bool = False) -> tuple[int, ...]:
        size = self.model.vocab_size
        bad = next((i for i in token_ids if not isinstance(i, int) or not 0 <= i < size), None)
        if bad is not None:
            raise ParameterError("token_ids", f"{bad!r:.60} is outside the vocabulary of {size}")
        if not token_ids and not empty:
            raise ParameterError("token_ids", "must hold at least one token")
        return tuple(token_ids)

    def _next(self) -> int:
        return next(self._numbers)
