"""Spans of one branch by what has been done to them: what a step asks costs O(log n) in the number of spans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush


class SpanState(Enum):
    """What has been done to a span. One that has left the raw table, folded or offloaded, is no longer kept.

    A quantised one has left it, too, but is kept whole in fewer bits, and may be folded once.
    """

    CLOSED = auto()
    PREPARED = auto()
    REFUSED = auto()
    QUANTISED = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Span:
    """Whole raw pages `[start, end)` of closed thinking. `due` and `commit_at` are positions to wait for.

    `ends` are ends of segments, counted from `start`: those inside, and one in the page behind the span.
    `pressed`: it is folded because memory is short, not because its position came; `forced`:
    whatever its estimate says. `whole`: it is quantised, and no longer raw; `to_whole`: that is what is being prepared.
    """

    start: int
    end: int
    due: int
    ends: tuple[int, ...] = ()
    state: SpanState = SpanState.CLOSED
    pressed: bool = False
    forced: bool = False
    whole: bool = False
    to_whole: bool = False
    commit_at: int = 0
    error: float | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start


Worth = Callable[[Span], int]  # pages that a fold of the span wins


class SpanBook:
    """All spans of a branch. Lists but `prepared` are by position; closed spans fall due in that order.

    `folded` are all that have left the raw table, quantised ones included.
    """

    def __init__(self, hold_before: int = 0) -> None:
        self.hold_before = hold_before  # closed spans that begin before this position wait in `held`
        self.held: list[Span] = []
        self.closed: list[Span] = []
        self.prepared: list[Span] = []
        self.refused: list[Span] = []
        self.quantised: list[Span] = []
        self.folded: list[tuple[int, int]] = []
        self.refused_tokens = 0
        self._folded_before = [0]  # tokens of the first i folded spans
        self._old: list[tuple[int, int, Span]] = []  # heap: closed spans that have been due, by worth; lazily emptied
        self._old_end = 0  # closed spans up to here have been put there

    @property
    def folded_tokens(self) -> int:
        return self._folded_before[-1]

    def all(self) -> list[Span]:
        """Every span that is raw, by position."""
        prepared = (span for span in self.prepared if not span.whole)
        return sorted([*self.held, *self.closed, *prepared, *self.refused], key=_start)

    def all_whole(self) -> list[Span]:
        """Every span that is quantised and no more, by position."""
        return sorted([*self.quantised, *(span for span in self.prepared if span.whole)], key=_start)

    def close(self, span: Span) -> Span:
        """A span is closed."""
        insort(self.held if span.start < self.hold_before else self.closed, span, key=_start)
        return span

    def hold(self, position: int) -> None:
        """Closed spans that begin before `position` are not there for anybody; earlier ones come back."""
        if position != self.hold_before:
            self.hold_before = position
            spans, self.held, self.closed = [*self.held, *self.closed], [], []
            for span in spans:
                self.close(span)
            self._old, self._old_end = [], 0

    def num_closed(self, end: int | None) -> int:
        """Closed spans that end at `end` or before; None: all."""
        return len(self.closed) if end is None else bisect_right(self.closed, end, key=_end)

    def next_due(self, position: int, count: int) -> int | None:
        """The first position behind `position` at which one of the first `count` closed spans is due."""
        index = bisect_right(self.closed, position, hi=count, key=_due)
        return self.closed[index].due if index < count else None

    def raw(self, end: int) -> tuple[int, int] | None:
        """From the first to the last span that is closed or refused and ends at `end` or before."""
        lists = [(spans, bisect_right(spans, end, key=_end)) for spans in (self.closed, self.refused)]
        known = [(spans[0].start, spans[count - 1].end) for spans, count in lists if count]
        return (min(s for s, _ in known), max(e for _, e in known)) if known else None

    def prepare(self, span: Span) -> None:
        """The span is being judged."""
        self._take(span)
        span.state = SpanState.PREPARED
        self.prepared.append(span)

    def reopen(self, span: Span) -> None:
        """The span is not judged after all."""
        self._take(span)
        if span.whole:
            self._keep_whole(span)
            return
        span.state = SpanState.CLOSED
        self.close(span)
        self._old, self._old_end = [], 0  # it may have left the heap

    def refuse(self, span: Span) -> None:
        """The span stays raw, or quantised."""
        self._take(span)
        if span.whole:
            self._keep_whole(span)
            return
        span.state = SpanState.REFUSED
        self.refused_tokens += span.tokens
        insort(self.refused, span, key=_start)

    def fold(self, span: Span) -> None:
        """The span is in a summary, and if it was raw its pages have left the raw table."""
        self._take(span)
        span.state = SpanState.GONE
        if not span.whole:
            self._leave(span)

    def quantise(self, span: Span) -> None:
        """The span's pages have left the raw table, and what was in them is kept whole in fewer bits."""
        self._take(span)
        self._leave(span)
        self._keep_whole(span)

    def _keep_whole(self, span: Span) -> None:
        span.state, span.whole = SpanState.QUANTISED, True
        insort(self.quantised, span, key=_start)

    def _leave(self, span: Span) -> None:
        index = bisect_left(self.folded, (span.start, span.end))
        self.folded.insert(index, (span.start, span.end))
        before = self._folded_before
        before.insert(index + 1, before[index])
        for i in range(index + 1, len(before)):
            before[i] += span.tokens

    def tokens_folded_before(self, position: int) -> int:
        """Tokens of folded spans that end at `position` or before."""
        return self._folded_before[bisect_left(self.folded, (position, position))]

    def most_worth(self, position: int, count: int, worth: Worth) -> tuple[bool, int, Span] | None:
        """Of the first `count` closed spans one that wins most pages: (it has been due, its worth, the span).

        Those that have been due by `position` come first; None if no span wins anything.
        """
        index = bisect_right(self.closed, self._old_end, key=_end)
        while index < count and self.closed[index].due <= position:
            span = self.closed[index]
            self._old_end, index = span.end, index + 1
            if (pages := worth(span)) > 0:
                heappush(self._old, (-pages, span.start, span))
        while self._old and self._old[0][2].state is not SpanState.CLOSED:
            heappop(self._old)
        if self._old:
            return True, -self._old[0][0], self._old[0][2]
        young = [(worth(span), span) for span in self.closed[index:count]]  # no more than close within a fold's delay
        best = max(young, key=lambda pair: pair[0], default=None)
        return None if best is None or best[0] <= 0 else (False, *best)

    def _take(self, span: Span) -> None:
        """Out of the list in which it is."""
        spans = {
            SpanState.CLOSED: self.closed,
            SpanState.PREPARED: self.prepared,
            SpanState.REFUSED: self.refused,
            SpanState.QUANTISED: self.quantised,
        }
        (self.held if span in self.held else spans[span.state]).remove(span)
        if span.state is SpanState.REFUSED:
            self.refused_tokens -= span.tokens


def _start(span: Span) -> int:
    return span.start


def _end(span: Span) -> int:
    return span.end


def _due(span: Span) -> int:
    return span.due
