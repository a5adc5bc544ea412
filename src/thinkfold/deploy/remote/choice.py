"""One choice over a remote server: completions one behind the other, cut where its control says so.

A part is one streamed completion. Where thinking is closed, tokens are injected or a token is replaced, the stream is
closed and the next part goes on behind what counts; the remote prefix cache has nearly all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from thinkfold.control.parts import PartControl
from thinkfold.deploy.remote.dialect import BANNED, SEED_BITS, Dialect
from thinkfold.deploy.remote.http import Api
from thinkfold.deploy.remote.tokens import Drawn, Piece, TokenReader
from thinkfold.engine.language import Language
from thinkfold.errors import RemoteError
from thinkfold.types import EngineRequest, FinishReason, Phase, ThinkingEndReason, TokenLogprobs, TokenStats

COMPLETIONS = "/v1/completions"
NATIVE_SLACK = 4  # thinking tokens over its budget after which the server is not trusted to end it


@dataclass(frozen=True, slots=True)
class Line:
    """What all choices share: a server, how to speak to it, and the model's tokens."""

    api: Api
    dialect: Dialect
    reader: TokenReader
    language: Language

    def prompt(self, token_ids: list[int]) -> str | list[int]:
        """As the server takes it."""
        return list(token_ids) if self.dialect.prompt_ids else self.reader.text(token_ids)


class Choice:
    """`run` it once. `moved` is called after every change, and has the news to take."""

    def __init__(
        self, line: Line, request: EngineRequest, index: int, control: PartControl, moved: Callable[[Choice], None]
    ) -> None:
        self.index = index
        self.control = control
        self.ids = list(request.prompt_token_ids)
        self.stats: list[TokenStats] = []
        self.logprobs: list[TokenLogprobs] = []
        self.error: Exception | None = None
        self.cached_tokens: int | None = None  # of the first part's prompt, where the server tells
        self.begun = False  # it has had its turn
        self.drawing = False
        self.budget: int | None = None  # that the server itself keeps
        self.spent = False  # the server says that it has ended thinking for its budget
        self.discarded = 0
        self._line, self._request, self._moved = line, request, moved
        self._parts = 0
        self._part: asyncio.Task[None] | None = None
        self._holds = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._stirred = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.control.finish_reason is not None

    @property
    def thinks(self) -> bool:
        return not self.ended and self.control.phase is Phase.THINKING

    @property
    def used(self) -> int:
        """Thinking tokens, the prompt's among them."""
        return self._request.prompt.prefilled_thinking + self.control.num_thinking_tokens

    async def run(self) -> None:
        """Draw to the end. A failure of the server is the choice's end, too; only cancelling raises."""
        self.begun = True
        try:
            while not self.ended:
                await self._free.wait()
                self._part = asyncio.create_task(self._draw())
                await asyncio.wait({self._part})
                part, self._part = self._part, None
                if not part.cancelled():  # else somebody holds the choice
                    part.result()
        except Exception as error:  # rule: one request's failure is its own
            self.fail(error)
        finally:
            await self._stop_part()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error = error
        self.control.finish(FinishReason.ERROR)
        self._tell()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Nothing is drawn meanwhile, and no character is torn; drawing goes on behind what is known then."""
        async with self._holds:
            while self.control.pending and not self.ended:
                self._stirred.clear()
                await self._stirred.wait()
            self._free.clear()
            try:
                await self._stop_part()
                yield
            finally:
                self._free.set()

    def inject(self, token_ids: tuple[int, ...]) -> int:
        """Append tokens while the choice is held; returns its output tokens so far. Raises as the control does."""
        self.ids += self.control.inject(token_ids)
        self._tell()
        return self.control.num_output_tokens

    async def _stop_part(self) -> None:
        part = self._part
        if part is not None and not part.done():
            part.cancel()
            await asyncio.wait({part})

    async def _draw(self) -> None:
        """One part."""
        control = self.control
        self.ids += control.injection()
        if self.ended:
            self._tell()
            return
        limit = self._run_length()
        before, finish = control.num_output_tokens, None
        events, reader = self._line.api.stream(COMPLETIONS, self._body(limit)), self._line.reader.part(control.phase)
        self.drawing = True
        try:
            async with aclosing(events):
                async for event in events:
                    piece = reader.read(event)
                    self._note_told(piece)
                    cut = self._take(piece)
                    self._tell()
                    if cut:
                        return
                    finish = piece.finish or finish
        finally:
            self.drawing = False
            self._parts += 1
        self._part_ended(finish, limit, control.num_output_tokens - before)
        self._tell()

    def _run_length(self) -> int | None:
        """Tokens to draw before the request must change; None to the end."""
        if not self.control.ban_eos(0) or not self._line.dialect.logit_bias:
            return None
        return max(1, self._request.sampling.min_tokens - self.control.num_output_tokens)

    def _body(self, limit: int | None) -> dict[str, Any]:
        sampling, dialect = self._request.sampling, self._line.dialect
        left = (sampling.max_tokens or 1) - self.control.num_output_tokens
        seed = (sampling.seed or 0) + self.index + 1_000_003 * self._parts  # each part draws other numbers
        more = dialect.sampled(sampling) | {"seed": seed % 2**SEED_BITS}
        bias = {str(i): b for i, b in sampling.logit_bias.items()}
        if limit is not None:
            bias |= {str(i): BANNED for i in self._line.language.vocabulary.eos_ids}
        if bias:
            more["logit_bias"] = bias
        if self.budget is not None:
            more["thinking_token_budget"] = self.budget
        prompt = self._line.prompt(self.ids)
        return dialect.body(prompt, min(left, limit or left), look=sampling.logprobs is not None, **more)

    def _take(self, piece: Piece) -> bool:
        """Account for its tokens; True if what the server draws behind them is not wanted."""
        for at, token in enumerate(piece.tokens):
            phase = self.control.phase
            verdict = self.control.accept(token.token_id)
            self._note(token, None if self.control.last_token_is_silent else phase)
            self.ids.append(verdict.token_id)
            self.ids += verdict.inject
            if self.ended or verdict.inject or verdict.token_id != token.token_id:
                self.discarded += len(piece.tokens) - at - 1
                return True
        if self.budget is not None and self.thinks and self.used > self.budget + NATIVE_SLACK:
            self.control.end_thinking(ThinkingEndReason.BUDGET)
        return False

    def _note(self, token: Drawn, phase: Phase | None) -> None:
        if token.stats is not None:
            self.stats.append(token.stats)
        most = self._request.sampling.logprobs
        found = token.logprobs
        if most is not None and found is not None:
            self.logprobs.append(TokenLogprobs(found.token_id, found.logprob, found.top[:most], phase))

    def _note_told(self, piece: Piece) -> None:
        self.spent |= piece.thinking_end == ThinkingEndReason.BUDGET
        if self._parts == 0 and piece.cached_tokens is not None:
            self.cached_tokens = piece.cached_tokens

    def _part_ended(self, finish: str | None, limit: int | None, drawn: int) -> None:
        """The server has ended the part. Raises RemoteError if that is no end."""
        if finish == "stop":
            eos = min(self._line.language.vocabulary.eos_ids, default=None)
            if eos is None:
                self.control.finish(FinishReason.STOP)
                return
            verdict = self.control.accept(eos)
            self.ids += (verdict.token_id, *verdict.inject)
        elif finish == "length":
            if limit is None or not drawn:
                self.control.finish(FinishReason.LENGTH)
        elif finish is None:
            raise RemoteError("the remote engine cut its stream")
        else:
            raise RemoteError(f"the remote engine ended its stream with {finish!r:.60}")

    def _tell(self) -> None:
        self._stirred.set()
        self._moved(self)
