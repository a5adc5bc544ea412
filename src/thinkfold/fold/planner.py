"""When thinking is folded: spans of one branch, and the positions at which something is due. Plain integers, no torch.

Positions are logical (prompt and output tokens counted from 0). Under `eager` everything hangs on positions alone, so a
branch folds at the same tokens alone, in a busy batch, one step ahead of the device, and when it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.errors import ParameterError
from thinkfold.fold.spans import Span, SpanBook, SpanState, Worth
from thinkfold.types import DELIMITER_LAG, AtAnswer, FoldMode, FoldPolicy

COMMIT_LAG = 4  # positions from judging to committing: the estimate comes home in between, even one step ahead
ANSWER_LAG = 2  # the answer is known to have begun this many positions after its first token, even one step ahead


class FoldPlanner:
    """Cuts closed segments into spans and says what is due. Never folds the prompt, the open segment or a summary."""

    def __init__(self, policy: FoldPolicy, page_size: int, num_prompt_tokens: int) -> None:
        self.policy = policy
        self.numbers = policy.numbers
        self.num_prompt_tokens = num_prompt_tokens
        self._page_size = page_size
        self._eager = policy.policy is FoldMode.EAGER
        # no span may be due before its end is known
        self._known_after = 0 if policy.delimiter_regex is None else DELIMITER_LAG + COMMIT_LAG
        self.told: set[tuple[int, bool]] = set()  # (start, refused) of what is known outside; survives a restart
        self.restart()

    def restart(self) -> None:
        """Everything is computed anew from the prompt on; what was found is read again."""
        self._next_start = -(-self.num_prompt_tokens // self._page_size) * self._page_size
        self._seen = 0
        self._answer_start: int | None = None
        self._segment_start = self._segment_end = self.num_prompt_tokens  # of the newest closed segment
        self._ends: list[int] = []  # of closed segments that reach behind the last span
        self._book = SpanBook()

    @property
    def spans(self) -> list[Span]:
        """All spans that are not folded, by position."""
        return self._book.all()

    @property
    def folded(self) -> list[tuple[int, int]]:
        """`[start, end)` of folded spans, by position."""
        return self._book.folded

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
                    span.due = min(span.due, start) if self._eager else start

    def to_prepare(self, position: int) -> Span | None:
        """A span whose time has come when the token at `position` is computed next."""
        closed = self._book.closed
        return closed[0] if self._num_timed() and closed[0].due <= position else None

    def to_commit(self, position: int) -> Span | None:
        """A prepared span whose turn it is; `error` is None while its estimate is still to come."""
        ready = (s for s in self._book.prepared if s.commit_at <= position)
        return min(ready, key=lambda span: span.start, default=None)

    def next_event(self, position: int) -> int | None:
        """The next position after `position` at which something is due: a row must end there."""
        events = [s.commit_at for s in self._book.prepared if s.commit_at > position]
        due = self._book.next_due(position, self._num_timed())
        return min(events if due is None else [*events, due], default=None)

    def under_pressure(self, position: int, worth: Worth, *, force: bool = False) -> tuple[bool, int, Span] | None:
        """The span to fold now to win memory, by (it has been due, `worth`); never the last segment under an answer.

        An eager branch folds at its own positions and nowhere else, or its tokens would depend on who runs beside it.
        `force` breaks that promise, and offers again what the gate has refused: a bad fold beats a lost request.
        None if there is no such span that wins anything.
        """
        if self.policy.policy is FoldMode.OFF or (self._eager and not force):
            return None
        gives = self.answering and self.policy.at_answer is not AtAnswer.KEEP
        end = self._segment_start if gives else position - self.numbers.keep_raw_tokens
        book = self._book
        if not force:
            return book.most_worth(position, book.num_closed(end), worth)
        spans = (s for s in book.all() if s.end <= end and s.state is not SpanState.PREPARED)
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
        raw = self._book.raw(self._segment_start)
        return None if raw is None else (self._page(raw[0]), self._page(raw[1]))

    def offloaded(self) -> None:
        """What `to_offload` named has left the raw table."""
        for span in self.spans:
            if span.end <= self._segment_start:
                self._book.fold(span)

    def not_offloaded(self) -> None:
        """The host has no room for it now."""
        for span in self._book.closed[: self._book.num_closed(self._segment_start)]:
            self._book.refuse(span)

    def prepare(self, span: Span, position: int, *, pressed: bool = False) -> None:
        """`span` is being judged by the step that computes `position` next."""
        self._book.prepare(span)
        span.error, span.pressed = None, pressed
        span.commit_at = position if pressed else span.due + COMMIT_LAG

    def withdraw(self, span: Span) -> None:
        """The judged span's estimate is void: it may be judged again."""
        self._book.reopen(span)
        span.error, span.pressed, span.forced = None, False, False

    def give_up(self, span: Span) -> None:
        """The judged span stays raw."""
        self._book.refuse(span)

    def remove(self, span: Span) -> None:
        """The span's pages have left the raw table: folded, or moved to the host."""
        self._book.fold(span)

    def first_page(self, span: Span) -> int:
        """The span's first page as an index into the raw page table of now."""
        return self._page(span.start)

    def check_position(self, position: int) -> None:
        """Raise ParameterError, naming the nearest good positions, unless the branch can be forked at or rewound to it.

        Good positions lie behind all folded spans, or before the first, where all KV is raw.
        """
        folded = self.folded
        if folded and folded[0][0] < position < folded[-1][1]:
            first, last = folded[0][0], folded[-1][1]
            raise ParameterError(
                "position", f"{position} lies in folded thinking; the nearest valid positions are {first} and {last}"
            )

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
        self._ends.append(end)
        last_page = end // self._page_size * self._page_size
        if last_page > self._next_start:
            due = max(end + max(self.numbers.fold_delay, self._known_after), last_page + self.numbers.keep_raw_tokens)
            ends = tuple(e - self._next_start for e in self._ends)
            self._book.close(Span(self._next_start, last_page, due, ends))
            self._next_start, self._ends = last_page, [e for e in self._ends if e > last_page]
