"""Where thinking may be cut: ends of segments and ends of sentences. Knows no markers."""

from __future__ import annotations

from collections import deque

from thinkfold.thinking.delimiter import DelimiterSearch
from thinkfold.types import DELIMITER_LAG, Segment

SENTENCE_MARKS = frozenset(".!?。！？…")
CLOSING_MARKS = "\"'”’)]}»」』*"
BLANK_LINE = b"\n\n"


class SegmentFinder:
    """Cuts thinking at blank lines, at delimiter tokens, where `search` finds a match, and at `max_tokens`.

    With `search` a token is read when DELIMITER_LAG more have come, or at the end.

    A segment holds at least `min_tokens` tokens, except the last one of a block, which ends
    with the block. Leading newlines never make a segment of their own.
    """

    __slots__ = (
        "_after_newline", "_delimiters", "_done", "_has_text", "_late", "_max", "_min", "_next_id", "_search", "_start",
    )  # fmt: skip

    def __init__(
        self, delimiters: frozenset[int], min_tokens: int, max_tokens: int, search: DelimiterSearch | None = None
    ) -> None:
        self._delimiters = delimiters
        self._min = min_tokens
        self._max = max_tokens
        self._start: int | None = None
        self._has_text = False
        self._after_newline = False
        self._next_id = 0
        self._done: list[Segment] = []
        self._search = search
        self._late: deque[tuple[int, int, bytes, bool]] = deque()  # tokens that wait for the search

    def open(self, index: int) -> None:
        """Thinking begins with output token `index`."""
        self._begin(index)

    def close(self, end: int) -> None:
        """Thinking ended before output token `end`."""
        self.drain()
        if self._start is not None and end > self._start:
            self._finish(end)
        self._start = None

    def push(self, index: int, token_id: int, data: bytes, *, holding: bool) -> None:
        """Read thinking token `index`; nothing is cut while a marker may be under way."""
        if self._start is None:
            return
        if self._search is None:
            self._read(index, token_id, data, holding, matched=False)
            return
        self._search.push(data)
        self._late.append((index, token_id, data, holding))
        if len(self._late) > DELIMITER_LAG:
            self._read(*self._late.popleft(), matched=self._search.pop())

    def drain(self) -> None:
        """Read what waits for the search: no more will come soon."""
        while self._late and self._search is not None:
            self._read(*self._late.popleft(), matched=self._search.pop())

    def take(self) -> list[Segment]:
        """Segments finished since the last call."""
        done, self._done = self._done, []
        return done

    def _read(self, index: int, token_id: int, data: bytes, holding: bool, *, matched: bool) -> None:
        assert self._start is not None, "a token is read between its block's begin and end"
        blank_line = BLANK_LINE in data or (self._after_newline and data.startswith(b"\n"))
        self._has_text = self._has_text or bool(data.strip(b"\n"))
        self._after_newline = data.endswith(b"\n") if data else self._after_newline
        length = index + 1 - self._start
        if holding or length < self._min:
            return
        natural = matched or token_id in self._delimiters or (blank_line and self._has_text)
        if natural or length >= self._max:
            self._finish(index + 1)
            self._begin(index + 1)

    def _begin(self, index: int) -> None:
        self._start, self._has_text, self._after_newline = index, False, False

    def _finish(self, end: int) -> None:
        assert self._start is not None
        self._done.append(Segment(self._next_id, self._start, end))
        self._next_id += 1


class SentenceEnds:
    """Says whether the text so far ends a sentence or a line."""

    __slots__ = ("_last", "at_end")

    def __init__(self) -> None:
        self._last = ""
        self.at_end = False

    def push(self, text: str) -> None:
        """Read one token's text. A full stop behind a digit may be a decimal point: no end."""
        body = text.rstrip(CLOSING_MARKS)
        mark = body[-1:]
        before = body[-2:-1] or self._last
        self.at_end = "\n" in text or (bool(mark) and mark in SENTENCE_MARKS and not (mark == "." and before.isdigit()))
        self._last = text[-1:] or self._last
