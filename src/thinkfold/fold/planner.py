"""When thinking is folded: spans of one branch, and the positions at which something is due. Plain integers, no torch.

Positions are logical (prompt and output tokens counted from 0). Under `eager` everything hangs on positions alone, so a
branch folds at the same tokens alone, in a busy batch, one step ahead of the device, and when it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from thinkfold.errors import ParameterError
from thinkfold.types import AtAnswer, FoldMode, FoldPolicy, FoldProfile

COMMIT_LAG = 4  # positions from judging to committing: the estimate comes home in between, even one step ahead
ANSWER_LAG = 2  # the answer is known to have begun this many positions after its first token, even one step ahead


class SpanState(Enum):
    """What has been done to a span. A folded one is no longer kept."""

    CLOSED = auto()
    PREPARED = auto()
    REFUSED = auto()


@dataclass(slots=True, eq=False)
class Span:
    """Whole raw pages `[start, end)` of closed thinking. `due` and `commit_at` are positions to wait for.

    `ends` are ends of segments, counted from `start`: those inside, and one in the page behind the span.
    `pressed`: it is folded because memory is short, not because its position came; `forced`:
    whatever its estimate says.
    """

    start: int
    end: int
    due: int
    ends: tuple[int, ...] = ()
    state: SpanState = SpanState.CLOSED
    pressed: bool = False
    forced: bool = False
    commit_at: int = 0
    error: float | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start


class FoldPlanner:
    """Cuts closed segments into spans and says what is due. Never folds the prompt, the open segment or a summary."""

    def __init__(self, policy: FoldPolicy, page_size: int, num_prompt_tokens: int) -> None:
        self.policy = policy
        self.numbers = policy.numbers
        self.num_prompt_tokens = num_prompt_tokens
        self._page_size = page_size
        self._eager = policy.policy is FoldMode.EAGER
        self.told: set[tuple[int, bool]] = set()  # (start, refused) of what is known outside; survives a restart
        self.restart()

    def restart(self) -> None:
        """Everything is computed anew from the prompt on; what was found is read again."""
        self._next_start = -(-self.num_prompt_tokens // self._page_size) * self._page_size
        self._seen = 0
        self._answer_start: int | None = None
        self._segment_start = self._segment_end = self.num_prompt_tokens  # of the newest closed segment
        self._ends: list[int] = []  # of closed segments that reach behind the last span
        self.spans: list[Span] = []  # by position; folded ones are gone
        self.folded: list[tuple[int, int]] = []  # by position

    @property
    def folded_tokens(self) -> int:
        return sum(end - start for start, end in self.folded)

    @property
    def answering(self) -> bool:
        return self._answer_start is not None

    def observe(self, segment_ends: Sequence[int], answer_start: int | None) -> None:
        """Read what the branch's control has found: ends of segments and the answer's start, in output tokens."""
        for index in segment_ends[self._seen :]:
            self._close(self.num_prompt_tokens + index)
        self._seen = len(segment_ends)
        if answer_start is not None and self._answer_start is None:
            self._answer_start = self.num_prompt_tokens + answer_start
            if self.policy.at_answer is AtAnswer.RECYCLE and self.policy.policy is not FoldMode.PRESSURE:
                start = self._answer_start + ANSWER_LAG
                for span in self._behind_last_segment():
                    if span.state is SpanState.CLOSED:
                        span.due = min(span.due, start) if self._eager else start

    def to_prepare(self, position: int) -> Span | None:
        """A span whose time has come when the token at `position` is computed next."""
        return next((s for s in self._timed() if s.due <= position), None)

    def to_commit(self, position: int) -> Span | None:
        """A prepared span whose turn it is; `error` is None while its estimate is still to come."""
        return next((s for s in self.spans if s.state is SpanState.PREPARED and s.commit_at <= position), None)

    def next_event(self, position: int) -> int | None:
        """The next position after `position` at which something is due: a row must end there."""
        events = [s.due for s in self._timed()]
        events += [s.commit_at for s in self.spans if s.state is SpanState.PREPARED]
        return min((e for e in events if e > position), default=None)

    def under_pressure(self, position: int, *, force: bool = False) -> list[Span]:
        """Spans that may be folded now to win memory, oldest first; of an answering branch all but its last segment.

        An eager branch folds at its own positions and nowhere else, or its tokens would depend on who runs beside it.
        `force` breaks that promise, and offers again what the gate has refused: a bad fold beats a lost request.
        """
        if self.policy.policy is FoldMode.OFF or (self._eager and not force):
            return []
        if self.answering and self.policy.at_answer is not AtAnswer.KEEP:
            spans = self._behind_last_segment()
        else:
            spans = [s for s in self.spans if s.end + self.numbers.keep_raw_tokens <= position]
        return [s for s in spans if s.state is SpanState.CLOSED or (force and s.state is SpanState.REFUSED)]

    def to_offload(self, position: int) -> tuple[int, int] | None:
        """Raw page indices `[first, end)` that leave for the host now that the answer has begun, or None."""
        if self.policy.at_answer is not AtAnswer.SWAP or self._answer_start is None:
            return None
        if position < self._answer_start + ANSWER_LAG or any(s.state is SpanState.PREPARED for s in self.spans):
            return None
        spans = self._behind_last_segment()
        return (self.first_page(spans[0]), self.first_page(spans[-1]) + self._pages(spans[-1])) if spans else None

    def prepare(self, span: Span, position: int, *, pressed: bool = False) -> None:
        """`span` is being judged by the step that computes `position` next."""
        span.state, span.error, span.pressed = SpanState.PREPARED, None, pressed
        span.commit_at = position if pressed else span.due + COMMIT_LAG

    def give_up(self, span: Span) -> None:
        """The judged span stays raw."""
        span.state = SpanState.REFUSED

    def remove(self, span: Span) -> None:
        """The span's pages have left the raw table: folded, or moved to the host."""
        self.spans.remove(span)
        self.folded.append((span.start, span.end))
        self.folded.sort()

    def first_page(self, span: Span) -> int:
        """The span's first page as an index into the raw page table of now."""
        before = sum(end - start for start, end in self.folded if end <= span.start)
        return (span.start - before) // self._page_size

    def check_position(self, position: int) -> None:
        """Raise ParameterError, naming the nearest good positions, unless the branch can be forked at or rewound to it.

        Good positions lie behind all folded spans, or before the first, where all KV is raw.
        """
        if self.folded and self.folded[0][0] < position < self.folded[-1][1]:
            first, last = self.folded[0][0], self.folded[-1][1]
            raise ParameterError(
                "position", f"{position} lies in folded thinking; the nearest valid positions are {first} and {last}"
            )

    def _timed(self) -> list[Span]:
        """Closed spans with a position to wait for, by that position."""
        recycles = self.policy.policy is FoldMode.OFF and self.policy.at_answer is AtAnswer.RECYCLE
        if not (self._eager or (recycles and self.answering)):
            return []
        spans = self._behind_last_segment() if self.answering else self.spans
        return sorted((s for s in spans if s.state is SpanState.CLOSED), key=lambda s: s.due)

    def _behind_last_segment(self) -> list[Span]:
        return [s for s in self.spans if s.end <= self._segment_start]

    def _pages(self, span: Span) -> int:
        return span.tokens // self._page_size

    def _close(self, end: int) -> None:
        self._segment_start, self._segment_end = self._segment_end, end
        self._ends.append(end)
        last_page = end // self._page_size * self._page_size
        if last_page > self._next_start:
            due = max(end + self.numbers.fold_delay, last_page + self.numbers.keep_raw_tokens)
            ends = tuple(e - self._next_start for e in self._ends)
            self.spans.append(Span(self._next_start, last_page, due, ends))
            self._next_start, self._ends = last_page, [e for e in self._ends if e > last_page]


def folded_entries(numbers: FoldProfile, thinking: int, raw: int) -> float:
    """Entries that are left of `raw` ones when the `thinking` tokens among them are folded as soon as they may be.

    Segments are taken to be as long as the middle of the profile's range, and the open one as long as it can be.
    """
    tail = numbers.max_segment_tokens + max(numbers.fold_delay, numbers.keep_raw_tokens)
    span = (numbers.min_segment_tokens + numbers.max_segment_tokens) / 2
    behind = max(0, thinking - tail)
    return raw - behind + behind / span * numbers.entries
