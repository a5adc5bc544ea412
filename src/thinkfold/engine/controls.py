"""What `AsyncEngine` offers for a running request: each call is one order to the core and waits for its answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thinkfold.engine.commands import (
    Answer,
    Cancel,
    Drop,
    EndThinking,
    Forget,
    Fork,
    Hash,
    Inject,
    ListPins,
    Order,
    Pause,
    Prefill,
    Probe,
    Resume,
    Rollback,
    SetBudget,
    Unpin,
)
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.types import MAX_LOGPROBS, Handle, PinnedPrefix, ProbeResult, SamplingParams, ThinkingEndReason
from thinkfold.types.checks import integer

Unheard = Callable[[Answer], None]


def _ignore(answer: Answer) -> None:
    """Nothing was made that somebody would have to take away."""


class Controls(ABC):
    """Orders are done between two steps; `choice` None means every choice that has not ended.

    All raise NotFoundError for a request that is not running, and EngineDeadError.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[asyncio.Future[Answer], Unheard]] = {}  # whose answers are still to come
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

    async def probe(
        self,
        request_id: str,
        token_ids: Sequence[int],
        n: int,
        stop: Sequence[str] = (),
        choice: int | None = None,
        *,
        logprobs: int = 0,
    ) -> ProbeResult:
        """What the model would write after its tokens so far and `token_ids`: up to `n` greedy tokens.

        It runs beside the batch and leaves nothing behind; where there is no place for it, the result says why
        it was `dropped`. Raises ParameterError, and ConflictError while the request has no state on the device.
        """
        integer("n", n, 1)
        integer("logprobs", logprobs, 0, MAX_LOGPROBS)
        ids, stops = self._checked(token_ids, empty=True), SamplingParams(stop=tuple(stop)).stop
        order = Probe(
            call=self._next(),
            request_id=request_id,
            choice=choice,
            token_ids=ids,
            n=n,
            max_len=self.model.max_model_len,
            stop=stops,
            logprobs=logprobs,
        )
        return await self._ask(order)

    async def peek(self, request_id: str, token_ids: Sequence[int] = (), choice: int | None = None) -> ProbeResult:
        """One row of logits behind `token_ids`: its statistics and its most likely tokens. Otherwise like `probe`."""
        return await self.probe(request_id, token_ids, 1, choice=choice, logprobs=MAX_LOGPROBS)

    async def fork(self, request_id: str, at: int | None = None, choice: int | None = None) -> Handle:
        """Keep the state after `at` output tokens (None: all told) under a handle, from which `extend` goes on.

        Good are positions whose KV is raw and the border behind a folded span; for others PositionError names the
        nearest. While it lives, what it shares is not folded. Raises ParameterError, ConflictError.
        """
        return await self._ask(Fork(call=self._next(), request_id=request_id, choice=choice, at=at), self._unheard_fork)

    async def rollback(self, request_id: str, at: int, choice: int | None = None) -> int:
        """Go back to the state after `at` output tokens; the next output starts again. Raises like `fork`."""
        return await self._ask(Rollback(call=self._next(), request_id=request_id, choice=choice, at=at))

    async def state_hash(self, request_id: str, choice: int | None = None) -> str:
        """A name of all that decides how a choice goes on: tokens, folds, parameters, random numbers."""
        return await self._ask(Hash(call=self._next(), request_id=request_id, choice=choice))

    async def drop(self, handle: str, namespace: tuple[str, ...] = ()) -> None:
        """Forget a handle; what has started from it goes on. Raises NotFoundError."""
        await self._ask(Drop(call=self._next(), request_id=handle, namespace=namespace))

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
    ) -> PinnedPrefix:
        """Compute the whole pages of a prefix before it is asked for, and pin them; see `Prefill`.

        Answers when it is pinned or given up. A pin of that name is replaced. Raises ParameterError for ids,
        CapacityError for more than an owner may pin, and UnsupportedError without a prefix cache.
        """
        ids = self._checked(token_ids)
        if len(ids) > self.model.max_prompt_len:
            raise ParameterError("prefix", f"has {len(ids)} tokens, the model's limit is {self.model.max_prompt_len}")
        order = Prefill(
            call=self._next(),
            request_id=name,
            token_ids=ids,
            namespace=namespace,
            owner=owner,
            idle=idle,
            ttl_s=ttl_s,
            session=session,
        )
        return await self._ask(order)

    async def pinned(self, owner: str = "") -> list[PinnedPrefix]:
        """What is pinned for an owner."""
        return await self._ask(ListPins(call=self._next(), request_id="", owner=owner))

    async def unpin(self, name: str, owner: str = "") -> None:
        """Let go of an owner's pin. Raises NotFoundError."""
        await self._ask(Unpin(call=self._next(), request_id=name, owner=owner))

    async def forget(self, owner: str = "", labels: tuple[str, ...] = (), session: str = "") -> dict[str, int]:
        """Let go of all that is kept for an owner and for namespaces that begin with `labels`: how many of what.

        Handles, pinned prefixes, pages of the prefix cache. Running requests go on with what they hold. With
        `session` only of what that one alone has used; its requests, running and paused, end as aborted.
        """
        return await self._ask(Forget(call=self._next(), request_id="", owner=owner, labels=labels, session=session))

    async def _ask(self, order: Order, unheard: Unheard = _ignore) -> Any:
        """The order's value; raises its error. `unheard` gets the answer if the caller has given up meanwhile."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._send(order)
        self._calls[order.call] = future, unheard
        try:
            answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                unheard(future.result())  # it has come in the same moment
            raise
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _hear(self, answers: Iterable[Answer]) -> None:
        """Answers have come from the core."""
        for answer in answers:
            future, unheard = self._calls.pop(answer.call, (None, _ignore))
            if future is not None and future.cancelled():
                unheard(answer)
            elif future is not None:
                future.set_result(answer)

    def _unheard_fork(self, answer: Answer) -> None:
        if answer.error is None:
            self._let_go(answer.value)

    def _let_go(self, handle: Handle) -> None:
        """Nobody has heard of the handle, and nobody will."""
        with contextlib.suppress(EngineDeadError):
            self._send(Drop(call=self._next(), request_id=handle.id))

    def _fail_calls(self, error: Exception) -> None:
        """No answer will come any more."""
        for future, _ in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

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
