"""When thinking is folded: spans of one branch, and the positions at which something is due. Plain integers, no torch.

Positions are logical (prompt and output tokens counted from 0). Under `eager` everything hangs on positions alone, so a
branch folds at the same tokens alone, in a busy batch, one step ahead of the device, and when it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.errors import PositionError
from thinkfold.fold.spans import Span, SpanBook, SpanState, Worth
from thinkfold.types import DELIMITER_LAG, AtAnswer, FoldMode, FoldPolicy, FoldProfile

COMMIT_LAG = 4  # positions from judging to committing: the estimate comes home in between, even one step ahead
ANSWER_LAG = 2  # the answer is known to have begun this many positions after its first token, even one step ahead


class FoldPlanner:
    """Cuts closed segments into spans and says what is due.

    Never folds the prompt, what thinking begins with, the open segment or a summary.
    """

    def __init__(
        self,
        policy: FoldPolicy,
        page_size: int,
        num_prompt_tokens: int,
        window: int = 0,
        numbers: FoldProfile | None = None,
    ) -> None:
        """Some of the model's layers see `window` tokens: a span leaves only when it lies behind them; 0 is none.

        `numbers` other than the policy's own are for those who simulate.
        """
        self.policy = policy
        self.numbers = (numbers or policy.numbers).behind(window)
        self._window = window
        self.num_prompt_tokens = num_prompt_tokens
        self._page_size = page_size
        self._eager = policy.policy is FoldMode.EAGER
        # no span may be due before its end is known
        self._known_after = 0 if policy.delimiter_regex is None else DELIMITER_LAG + COMMIT_LAG
        self.told: set[tuple[int, bool, bool]] = set()  # (start, refused, quantised) known outside; survives a restart
        self._book = SpanBook()
        self.restart()

    def fork(self, position: int, segment_ends: Sequence[int], answer_start: int | None) -> FoldPlanner:
        """The planner of a branch that shares the first `position` tokens, in which those ends were found."""
        child = FoldPlanner(self.policy, self._page_size, self.num_prompt_tokens, self._window, self.numbers)
        child.told = {known for known in self.told if known[0] < position}
        child.observe(segment_ends, answer_start)
        known, whole = {span.start: span for span in child.spans}, {s.start: s.ends for s in self._book.all_whole()}
        for start, end in self.folded:
            if end <= position:  # its segment may end behind the position: then it is not closed there
                span = known.pop(start, None) or child._book.close(Span(start, end, end, whole.get(start, ())))
                (child._book.quantise if start in whole else child._book.fold)(span)
                child._next_start = max(child._next_start, end)
        child._ends = [end for end in child._ends if end > child._next_start]
        for span in self._book.refused:
            if span.start in known and known[span.start].end == span.end:
                child._book.refuse(known[span.start])
        child._taken = [taken for taken in self._taken if taken[1] <= position]
        return child

    def hold(self, position: int) -> None:
        """Nothing that begins before `position` is taken out from now on; a lower one lets go of some."""
        self._book.hold(position)

    def restart(self) -> None:
        """Everything is computed anew from the prompt on; what was found is read again."""
        first = self.num_prompt_tokens + self.numbers.keep_first_tokens
        self._next_start = -(-first // self._page_size) * self._page_size
        self._seen = 0
        self._answer_start: int | None = None
        self._segment_start = self._segment_end = self.num_prompt_tokens  # of the newest closed segment
        self._ends: list[int] = []  # of closed segments that reach behind the last span
        self._book = SpanBook(self._book.hold_before)
        self._taken: list[tuple[int, int, list[int]]] = []  # (start, end, summary entries by head after it), in order

    @property
    def spans(self) -> list[Span]:
        """All spans that are raw, by position."""
        return self._book.all()

    @property
    def folded(self) -> list[tuple[int, int]]:
        """`[start, end)` of spans that have left the raw table, by position."""
        return self._book.folded

    @property
    def quantised(self) -> list[tuple[int, int]]:
        """Those of them that are kept whole in fewer bits, by position."""
        return [(span.start, span.end) for span in self._book.all_whole()]

    @property
    def folded_tokens(self) -> int:
        return self._book.folded_tokens

    @property
    def refused(self) -> tuple[int, int]:
        """Spans that stay raw, and their tokens."""
        return len(self._book.refused), self._book.refused_tokens

    @property
    def answering(self) -> bool:
        return self._answer_start is not None

    def observe(self, segment_ends: Sequence[int], answer_start: int | None) -> None:
        """Read what the branch's control has found: ends of segments and the answer's start, in output tokens."""
        for index in range(self._seen, len(segment_ends)):
            self._close(self.num_prompt_tokens + segment_ends[index])
        self._seen = len(segment_ends)
        if answer_start is not None and self._answer_start is None:
            self._answer_start = self.num_prompt_tokens + answer_start
            if self.policy.at_answer is AtAnswer.RECYCLE and self.policy.policy is not FoldMode.PRESSURE:
                start, book = self._answer_start + ANSWER_LAG, self._book
                for span in book.closed[: book.num_closed(self._segment_start)]:
                    span.due = max(min(span.due, start) if self._eager else start, span.end + self._window)

    def to_prepare(self, position: int) -> Span | None:
        """A span whose time has come when the token at `position` is computed next."""
        closed = self._book.closed
        return closed[0] if closed and closed[0].due <= position and self._num_timed() else None

    def to_commit(self, position: int) -> Span | None:
        """A prepared span whose turn it is; `error` is None while its estimate is still to come."""
        ready = [s for s in self._book.prepared if s.commit_at <= position]
        return min(ready, key=lambda span: span.start) if ready else None

    def next_event(self, position: int) -> int | None:
        """The next position after `position` at which something is due: a row must end there."""
        events = [s.commit_at for s in self._book.prepared if s.commit_at > position]
        due = self._book.next_due(position, self._num_timed())
        events += [] if due is None else [due]
        if self._offloads_at is not None and self._offloads_at > position:
            events.append(self._offloads_at)
        return min(events, default=None)

    def under_pressure(
        self, position: int, worth: Worth, *, force: bool = False, whole: bool = False
    ) -> tuple[bool, int, Span] | None:
        """The span to fold now to win memory, by (it has been due, `worth`); never the last segment under an answer.

        With `whole` one of those that are quantised, else a raw one.

        An eager branch folds at its own positions and nowhere else, or its tokens would depend on who runs beside it.
        `force` breaks that promise, and offers again, once, what the gate has refused: a bad fold beats a lost
        request. What finds no memory for its summary then would find none again.
        None if there is no such span that wins anything.
        """
        if self.policy.policy is FoldMode.OFF or (self._eager and not force):
            return None
        gives = self.answering and self.policy.at_answer is not AtAnswer.KEEP
        end = self._end_of_leaving(position) if gives else position - self.numbers.keep_raw_tokens
        book = self._book
        if not force and not whole:
            return book.most_worth(position, book.num_closed(end), worth)
        known = book.all() if not whole else [s for s in book.quantised if s.start >= book.hold_before]
        spans = (s for s in known if s.end <= end and s.state is not SpanState.PREPARED and not s.forced)
        if not force:
            spans = (span for span in spans if span.error is None)  # else the gate has refused it
        ranked = [(s.due <= position, pages, s) for s in spans if (pages := worth(s)) > 0]
        return max(ranked, key=lambda entry: entry[:2], default=None)

    def to_offload(self, position: int, *, short: bool = False) -> tuple[int, int] | None:
        """Raw page indices `[first, end)` that leave for the host now that the answer has begun, or None.

        Under `pressure` they leave only when memory is `short`.
        """
        if self.policy.at_answer is not AtAnswer.SWAP or self._answer_start is None:
            return None
        if self.policy.policy is FoldMode.PRESSURE and not short:
            return None
        if position < self._answer_start + ANSWER_LAG or self._book.prepared:
            return None
        raw = self._book.raw(self._end_of_leaving(position))
        return None if raw is None else (self._page(raw[0]), self._page(raw[1]))

    def offloaded(self, position: int) -> None:
        """What `to_offload` named has left the raw table; who goes back to before `position` would miss it."""
        lengths, end = self._taken[-1][2] if self._taken else [], self._end_of_leaving(position)
        for span in self.spans:
            if span.end <= end and span not in self._book.held:
                self._book.fold(span)
                self._taken.append((span.start, position, lengths))

    def not_offloaded(self, position: int) -> None:
        """The host has no room for it now."""
        for span in self._book.closed[: self._book.num_closed(self._end_of_leaving(position))]:
            self._book.refuse(span)

    def prepare(self, span: Span, position: int, *, pressed: bool = False, to_whole: bool = False) -> None:
        """`span` is being judged by the step that computes `position` next; `to_whole`: it is to be quantised."""
        self._book.prepare(span)
        span.error, span.pressed, span.to_whole = None, pressed, to_whole
        span.commit_at = position if pressed else span.due + COMMIT_LAG

    def withdraw(self, span: Span) -> None:
        """The judged span's estimate is void: it may be judged again."""
        self._book.reopen(span)
        span.error, span.pressed, span.forced, span.to_whole = None, False, False, False

    def give_up(self, span: Span) -> None:
        """The judged span stays as it is."""
        self._book.refuse(span)

    def remove(self, span: Span, lengths: list[int] | None = None) -> None:
        """The span is folded, or quantised if it was prepared for that. `lengths` are all summary entries by head now.

        What was quantised is folded in its place: the entries of later spans stand behind it as before.
        """
        lengths, whole = lengths or [], span.whole
        if span.to_whole:
            self._book.quantise(span)
            span.error, span.pressed, span.forced, span.to_whole = None, False, False, False
        else:
            self._book.fold(span)
        if not whole:
            self._taken.append((span.start, span.end, lengths))
            return
        change = [now - before for now, before in zip(lengths, self._taken[-1][2], strict=True)]
        at = self._index(span)
        for i, (start, end, known) in enumerate(self._taken[at:], at):
            self._taken[i] = start, end, [n + more for n, more in zip(known, change, strict=True)]

    def entries_before(self, span: Span) -> list[int]:
        """Entries by head of the summary that stand before those of a quantised span; empty for none."""
        at = self._index(span)
        return self._taken[at - 1][2] if at else []

    def _index(self, span: Span) -> int:
        """The number of a span that has left the raw table, in the order in which spans have."""
        return next(i for i, (start, end, _) in enumerate(self._taken) if (start, end) == (span.start, span.end))

    def first_page(self, span: Span) -> int:
        """The span's first page as an index into the raw page table of now."""
        return self._page(span.start)

    def cut(self, position: int) -> list[int]:
        """Entries by head of the summaries that belong to the first `position` tokens; empty if none does.

        Raises PositionError, in output tokens, where that state is gone: inside a span that was taken out, and
        between spans that were folded in another order.
        """
        lengths = self._cut(position)
        if lengths is None:
            borders = sorted({edge for start, end, _ in self._taken for edge in (start, end)})
            valid = [edge for edge in borders if self._cut(edge) is not None]
            near = [max((e for e in valid if e < position), default=None), *[e for e in valid if e > position][:1]]
            nearest = tuple(e - self.num_prompt_tokens for e in near if e is not None)
            raise PositionError(position - self.num_prompt_tokens, nearest)
        return lengths

    def _cut(self, position: int) -> list[int] | None:
        before = [end <= position for _, end, _ in self._taken]
        inside = any(start < position < end for start, end, _ in self._taken)
        if inside or before != sorted(before, reverse=True):
            return None
        return self._taken[sum(before) - 1][2] if any(before) else []

    def is_raw(self, position: int) -> bool:
        """Whether the entries of the token at `position` are in the raw table."""
        return not any(start <= position < end for start, end in self.folded)

    def tokens_folded_before(self, position: int) -> int:
        """Tokens of folded spans that end at `position` or before."""
        return self._book.tokens_folded_before(position)

    @property
    def _offloads_at(self) -> int | None:
        """The position at which thinking leaves for the host whatever memory there is, None if it does not."""
        always = self.policy.at_answer is AtAnswer.SWAP and self.policy.policy is not FoldMode.PRESSURE
        return self._answer_start + ANSWER_LAG if always and self._answer_start is not None else None

    def _end_of_leaving(self, position: int) -> int:
        """Where thinking ends that an answer need not keep: before its last segment, and behind every window.

        What is computed again after a preemption, up to `position`, may be less than what is known.
        """
        return min(self._segment_start, position - self._window)

    def _num_timed(self) -> int:
        """Closed spans that wait for a position; they are the first ones."""
        recycles = self.policy.policy is FoldMode.OFF and self.policy.at_answer is AtAnswer.RECYCLE
        if not (self._eager or (recycles and self.answering)):
            return 0
        return self._book.num_closed(self._segment_start if self.answering else None)

    def _page(self, position: int) -> int:
        """Raw page index of a position at the edge of a span."""
        return (position - self._book.tokens_folded_before(position)) // self._page_size

    def _close(self, end: int) -> None:
        self._segment_start, self._segment_end = self._segment_end, end
        if end > self._next_start:
            self._ends.append(end)
        last_page = end // self._page_size * self._page_size
        if last_page > self._next_start:
            due = max(end + max(self.numbers.fold_delay, self._known_after), last_page + self.numbers.keep_raw_tokens)
            ends = tuple(e - self._next_start for e in self._ends)
            self._book.close(Span(self._next_start, last_page, due, ends))
            self._next_start, self._ends = last_page, [e for e in self._ends if e > last_page]
