"""Every rule about one branch's tokens: budget, end tokens, stops, limits and its output.

Plain Python, O(1) a token. Knows nothing about memory, batches or the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from thinkfold.control.closing import Closing, Forced
from thinkfold.control.grammar import AnswerGrammar
from thinkfold.control.outbox import Outbox
from thinkfold.errors import ConflictError, ParameterError, UnsupportedError
from thinkfold.text.stop_strings import StopStrings
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.boundaries import BoundaryFinder
from thinkfold.thinking.delimiter import DelimiterSearch
from thinkfold.thinking.family import Family
from thinkfold.thinking.markers import Piece
from thinkfold.thinking.tracker import PlainTracker, Tracker
from thinkfold.types import Boundary, CompletionOutput, EngineRequest, FinishReason, Phase, ThinkingEndReason


class Verdict(NamedTuple):
    """What became of one sampled token.

    `token_id` is the token that counts (it may replace the sampled one), `inject` follows it
    and is already accounted. Tokens launched later are void if this injects, replaces, finishes
    or says `redraw`: they were drawn without the answer's grammar.
    """

    token_id: int
    inject: tuple[int, ...] = ()
    finish: FinishReason | None = None
    redraw: bool = False


class BranchControl:
    """The state of one branch. The caller's loop: `injection`, launch, `accept`, `take`.

    The result does not depend on how many tokens are launched before their verdicts are
    known. After `finish_reason` is set nothing changes any more.
    """

    def __init__(
        self,
        request: EngineRequest,
        branch: int,
        vocabulary: Vocabulary,
        family: Family | None,
        closing_ids: tuple[int, ...] = (),
        min_segment_tokens: int = 1,
        max_segment_tokens: int = 1024,
        grammar: AnswerGrammar | None = None,
        search: DelimiterSearch | None = None,
    ) -> None:
        self._sampling = request.sampling
        self._policy = request.thinking
        self._prefilled = request.prompt.prefilled_thinking
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._unprinted = vocabulary.special_ids | vocabulary.eos_ids
        self._force_ids = family.force_ids if family else ()
        self._tracker = (
            PlainTracker(vocabulary)
            if family is None
            else Tracker(
                family,
                request.prompt,
                min_segment_tokens=min_segment_tokens,
                max_segment_tokens=max_segment_tokens,
                search=search,
            )
        )
        self._closing = Closing(request.thinking.budget if self._force_ids else None, closing_ids)
        self._stops = {phase: StopStrings(request.sampling.stop) for phase in Phase}
        self._outbox = Outbox(branch)
        self._finder = BoundaryFinder(vocabulary)
        self._newest: list[Boundary] = []  # those that the newest token has completed
        self.forced: list[Forced] = []  # runs of tokens that were not drawn
        self.segment_ends: list[int] = []  # output token indices behind finished segments
        self.answer_start: int | None = None  # output token index of the answer's first token
        self._silent = False
        self._forcing = False
        self._eos_repaired = False
        self._barred_index = -1
        self._num_injected = 0
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._thinking_end: ThinkingEndReason | None = None
        self._end_cause = ThinkingEndReason.NATURAL

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    @property
    def num_output_tokens(self) -> int:
        """Sampled and injected tokens, end tokens and markers included."""
        return self._tracker.num_tokens

    @property
    def num_thinking_tokens(self) -> int:
        """Output tokens of thinking, markers and the prompt's part excluded."""
        return self._tracker.num_thinking_tokens

    @property
    def budget_left(self) -> int | None:
        """Thinking tokens that the budget still allows; None without a limit."""
        return self._closing.left(self._used)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set once the branch has ended; an injection can end it, too (max_tokens)."""
        return self._finish

    @property
    def last_token_is_silent(self) -> bool:
        """True if the last sampled token prints nothing by its nature: marker, end or special token."""
        return self._silent

    @property
    def ending(self) -> bool:
        """Whether somebody asked for the end of its thinking, which comes with its next token."""
        return self._closing.is_asked

    @property
    def _used(self) -> int:
        return self._prefilled + self._tracker.num_thinking_tokens

    def end_thinking(self, reason: ThinkingEndReason) -> None:
        """Close thinking by the budget's own way: now, or once a begun character is complete.

        It also closes what the model opens again. Raises UnsupportedError, ConflictError.
        """
        self._check_enforceable("end_thinking")
        if self._finish is not None or self.phase is not Phase.THINKING:
            raise ConflictError(f"choice {self._outbox.index} is not thinking")
        self._closing.ask(self._used, reason)

    def set_budget(self, budget: int | None) -> None:
        """Another budget from now on; one that is spent already closes thinking at once. Raises UnsupportedError."""
        if budget is not None:
            self._check_enforceable("budget")
        self._closing.set_budget(budget)

    def inject(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Account for forced tokens that follow the last known one; returns those to append.

        Only between characters (`pending`), or the character would be torn. Raises ParameterError for
        an end token, ConflictError for more than the budget or `max_tokens` has left.
        """
        if any(token_id in self._vocabulary.eos_ids for token_id in token_ids):
            raise ParameterError("token_ids", "an end token cannot be injected")
        if self._grammar is not None and self.phase is not Phase.THINKING:
            raise ConflictError("tokens cannot be injected: a grammar holds the answer")
        left = self.budget_left if self.phase is Phase.THINKING else None
        room = None if self._sampling.max_tokens is None else self._sampling.max_tokens - self.num_output_tokens
        for name, most in (("thinking budget", left), ("max_tokens", room)):
            if most is not None and len(token_ids) > most:
                raise ConflictError(f"{len(token_ids)} tokens cannot be injected: the {name} has {most} left")
        return self._inject(token_ids, ThinkingEndReason.CONTROL, closing=False)

    @property
    def num_injected_tokens(self) -> int:
        return self._num_injected

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def pending(self) -> bool:
        """True inside an unfinished character."""
        return self._tracker.pending

    def accept(self, token_id: int) -> Verdict:
        """Account for one sampled token. After the end it is ignored."""
        if self._finish is not None:
            return Verdict(token_id, (), self._finish)
        muted = self.num_output_tokens < self._sampling.min_tokens
        thinking = self.phase is Phase.THINKING
        if self._grammar is not None and not thinking:
            self._grammar.accept(token_id)
        if self._is_eos(token_id) and not muted and not self._sampling.ignore_eos:
            return self._accept_eos(token_id)
        stops_here = not thinking or self._sampling.stop_in_thinking
        if token_id in self._sampling.stop_token_ids and not muted and stops_here:
            return self._stop_at(token_id, reason=token_id)
        turned = self._account(token_id, silent=self._is_eos(token_id))
        self._silent = turned or self._tracker.at_marker or self._tracker.stripping or token_id in self._unprinted
        inject = self._inject_due()
        redraw = self._grammar is not None and thinking and turned
        return Verdict(token_id, inject, self._finish, redraw)

    def injection(self) -> tuple[int, ...]:
        """Tokens to append now instead of sampling, already accounted; () to sample.

        Call when every launched token is collected, then look at `finish_reason`.
        """
        return self._inject_due()

    def must_wait(self, inflight: int) -> bool:
        """True if the budget may bind once `inflight` launched tokens are collected, or a grammar binds now.

        For a budget launching further is then likely to be wasted, never wrong.
        """
        if not inflight or self._finish is not None:
            return False
        if self.phase is not Phase.THINKING:
            return self._grammar is not None  # what may come next depends on the token in flight
        return self._closing.may_bind(self._used + inflight)

    def ban_eos(self, inflight: int) -> bool:
        """True if the next token to launch must be neither an end token nor a stop id."""
        if self._grammar is not None and self.phase is not Phase.THINKING:
            return False  # the grammar says so itself
        index = self.num_output_tokens + inflight
        return index < self._sampling.min_tokens or index == self._barred_index

    def allowed(self) -> bytes | None:
        """The tokens that may be drawn next (see `AnswerGrammar`), None for all. With nothing in flight."""
        if self._grammar is None or self.phase is Phase.THINKING or self._finish is not None:
            return None
        return self._grammar.allowed()

    def finish(self, reason: FinishReason) -> None:
        """End the branch and release all held text. The first reason stays."""
        if self._finish is not None:
            return
        matched = self._write(self._tracker.flush(), muted=False)
        self._take_segments()
        if not matched:
            for phase in Phase:
                self._flush_stops(phase)
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._stop_reason = matched
            reason = FinishReason.STOP
        self._end(reason)

    def discard(self) -> None:
        """End the branch and keep nothing of it, told or untold."""
        self._outbox.discard()
        self._end(FinishReason.ABORT)

    @property
    def discarded(self) -> bool:
        return self._outbox.discarded

    def take(self) -> CompletionOutput | None:
        """The news since the last call, None if there is none."""
        return self.snapshot() if self._outbox.changed else None

    def snapshot(self) -> CompletionOutput:
        """The news since the last call and where the branch stands, also where nothing is new."""
        return self._outbox.take(
            phase=self.phase,
            num_output_tokens=self.num_output_tokens,
            num_thinking_tokens=self.num_thinking_tokens,
            num_injected_tokens=self._num_injected,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            thinking_end_reason=self._thinking_end,
        )

    def _is_eos(self, token_id: int) -> bool:
        if token_id not in self._vocabulary.eos_ids:
            return False
        return not (self.phase is Phase.THINKING and self._tracker.expects(token_id))

    def _accept_eos(self, token_id: int) -> Verdict:
        """EOS inside thinking closes thinking once; otherwise it ends the branch."""
        repair = self._policy.eos_in_thinking == "close" and self._force_ids and not self._eos_repaired
        self._silent = True
        if self.phase is Phase.THINKING and repair:
            self._eos_repaired = True
            ids = self._force_close(ThinkingEndReason.EOS)
            self._barred_index = self.num_output_tokens
            return Verdict(ids[0], ids[1:], self._finish)
        return self._stop_at(token_id, reason=None)

    def _stop_at(self, token_id: int, *, reason: int | None) -> Verdict:
        """The token ends the branch: it counts as output and prints nothing."""
        self._silent = True
        self._tracker.end()
        self._outbox.add_token(token_id)
        self._stop_reason = reason
        self.finish(FinishReason.STOP)
        return Verdict(token_id, (), self._finish)

    def _inject_due(self) -> tuple[int, ...]:
        """Close thinking if somebody asked for it or its budget is spent, or nearly spent at a sentence's end."""
        used = self._used
        if self._finish is not None or not self._closing.may_bind(used) or self.phase is not Phase.THINKING:
            return ()
        due = self._closing.due(used, at_boundary=self._tracker.at_boundary, pending=self._tracker.pending)
        if due is None:
            return ()
        words, cause = due
        return self._inject(words, cause, closing=True) + self._force_close(cause)

    def _check_enforceable(self, field: str) -> None:
        if not self._force_ids:
            raise UnsupportedError(field, "thinking of this model cannot be ended from outside")

    def _force_close(self, cause: ThinkingEndReason) -> tuple[int, ...]:
        held = self._tracker.held_ids
        begun = len(held) if held and self._force_ids[: len(held)] == held else 0
        self._forcing = True
        ids = self._inject(self._force_ids[begun:], cause, closing=True)
        self._forcing = False
        return ids

    def _inject(self, token_ids: Iterable[int], cause: ThinkingEndReason, *, closing: bool) -> tuple[int, ...]:
        """Account for forced tokens as far as the branch lives; returns those that count."""
        done: list[int] = []
        start = self.num_output_tokens
        self._end_cause = cause
        for token_id in token_ids:
            if self._finish is not None:
                break
            self._num_injected += 1
            done.append(token_id)
            self._account(token_id, silent=False)
        self._end_cause = ThinkingEndReason.NATURAL
        if done:
            self.forced.append(Forced(start, start + len(done), cause, closing))
        return tuple(done)

    def _account(self, token_id: int, *, silent: bool) -> bool:
        """One more output token: parse, match stops, count. Whether the phase has changed."""
        before = self.phase
        muted = self.num_output_tokens < self._sampling.min_tokens
        pieces = self._tracker.push(token_id, silent=silent)
        self._outbox.add_token(token_id)
        self._newest = self._finder.push(token_id)
        self._outbox.boundaries += self._newest
        self._take_segments()
        turned = before is not self.phase
        if turned and before is Phase.THINKING:
            self._thinking_end = self._end_cause
            self.answer_start = self.num_output_tokens
            if self._grammar is not None:
                self._grammar.thinking_ended()
        matched = self._write(pieces, muted=muted)
        if turned:
            self._flush_stops(before)
        if matched:
            self._stop_reason = matched
            self._end(FinishReason.STOP)
        elif self._sampling.max_tokens is not None and self.num_output_tokens >= self._sampling.max_tokens:
            if self._forcing:
                self._tracker.drop_held()  # max_tokens cuts the forced marker: it is not printed
            self.finish(FinishReason.LENGTH)
        return turned

    def _take_segments(self) -> None:
        segments = self._tracker.take_segments()
        if not segments:
            return
        self._outbox.segments += segments
        self.segment_ends += [segment.end for segment in segments]
        found = [Boundary("segment", segment.end) for segment in segments]
        self._newest += found
        self._outbox.boundaries += found

    def _write(self, pieces: list[Piece], *, muted: bool) -> str | None:
        """Print pieces up to the first stop string, which is returned."""
        for phase, text in pieces:
            self._flush_stops(Phase.ANSWER if phase is Phase.THINKING else Phase.THINKING)
            if muted or (phase is Phase.THINKING and not self._sampling.stop_in_thinking):
                self._outbox.write(phase, text)
                continue
            safe, matched = self._stops[phase].push(text)
            self._outbox.write(phase, safe)
            if matched:
                return matched
        return None

    def _flush_stops(self, phase: Phase) -> None:
        """No stop string reaches over a change of phase."""
        self._outbox.write(phase, self._stops[phase].flush())

    def _end(self, reason: FinishReason) -> None:
        if self.phase is Phase.THINKING:
            self._thinking_end = ThinkingEndReason.UNCLOSED
        self._finish = reason
        self._outbox.changed = True
