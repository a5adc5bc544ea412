"""Splits a stream of text into thinking and answer by markers written in the text.

Used behind the token tracker and, alone, for streams of remote engines. Knows no tokens.
"""

from __future__ import annotations

from thinkfold.thinking.markers import Action, MarkerSet, ParserTables, Piece, text_tables
from thinkfold.types import Phase

THINK_TAGS = MarkerSet(starts=("<think>",), ends=("</think>",))


class ThinkTextParser:
    """Feed text with `push`, end with `flush`; both return pieces without markers.

    The pieces, joined by phase, do not depend on how the text is cut. Held back are only
    a tail that could still become a marker, newlines at the end of thinking and blanks
    before the first word of a response (they vanish if a marker follows). `starts_open`
    says that the prompt has opened thinking; `strip_head` that the marker was its last text.
    """

    __slots__ = (
        "_base",
        "_blanks",
        "_head",
        "_held",
        "_newlines",
        "_skip",
        "_state",
        "_tables",
        "marker_start",
        "phase",
    )

    def __init__(
        self,
        markers: MarkerSet[str] | ParserTables[str] = THINK_TAGS,
        *,
        starts_open: bool,
        strip_head: bool | None = None,
    ) -> None:
        self._tables = markers if isinstance(markers, ParserTables) else text_tables(markers)
        self.phase = Phase.THINKING if starts_open else Phase.ANSWER
        self.marker_start = -1  # absolute character position of the last marker found
        self._head = True
        self._skip = starts_open if strip_head is None else strip_head
        self._base = 0  # absolute position of the first held character
        self._held = ""
        self._state = 0
        self._newlines = 0
        self._blanks: list[str] = []

    @property
    def held_length(self) -> int:
        """Characters that may become a marker."""
        return len(self._held)

    @property
    def stripping(self) -> bool:
        """True while nothing but newlines has come after a marker: they are dropped."""
        return self._skip

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._base + len(self._held)

    def push(self, text: str) -> list[Piece]:
        """Read more text."""
        pieces: list[Piece] = []
        while text:
            text = self._scan(text, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """Release everything held: the stream has ended."""
        pieces = self._release_held()
        if self._newlines:
            pieces.append(Piece(self.phase, "\n" * self._newlines))
        if self._blanks:
            pieces.append(Piece(self.phase, "".join(self._blanks)))
        self._newlines, self._blanks = 0, []
        return pieces

    def switch(self, phase: Phase, *, strip: bool = True) -> list[Piece]:
        """A marker outside the text (a token) was seen: release what is held, then change."""
        pieces = self._release_held()
        self._enter(phase, strip=strip)
        return pieces

    def swallow(self) -> None:
        """A marker outside the text was dropped; newlines after it go with it at the head."""
        self._skip = self._skip or (self._head and not self._held)

    def drop_held(self) -> None:
        """Forget the begun marker, and the newlines before it."""
        self._base += len(self._held)
        self._held, self._state, self._newlines = "", 0, 0

    def _release_held(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._held, self._state = self._held, "", 0
        self._base += len(held)
        self._print(held, pieces)
        return pieces

    def _scan(self, text: str, pieces: list[Piece]) -> str:
        """Read to the next marker or the end of the head; returns what is still to be read."""
        table = self._tables.at(self.phase, self._head)
        automaton, state = table.automaton, self._state
        if not (self._held or self._head) and automaton.starts.isdisjoint(text):  # most text is far from a marker
            self._base += len(text)
            self._print(text, pieces)
            return ""
        depth, match = automaton.depth, automaton.match
        seen = self._held + text
        printable = 0
        for position in range(len(self._held), len(seen)):
            state = automaton.step(state, seen[position])
            if match[state] >= 0:
                return self._act(table.actions[match[state]], table.lengths[match[state]], seen, position + 1, pieces)
            if self._head:
                free = position + 1 - depth[state]
                if free > printable and not seen[printable:free].isspace():
                    self._head, self._held, self._state = False, "", 0
                    return seen
                printable = free
        safe = len(seen) - depth[state]
        self._base += safe
        self._held, self._state = seen[safe:], state
        self._print(seen[:safe], pieces)
        return ""

    def _act(self, action: Action, length: int, seen: str, end: int, pieces: list[Piece]) -> str:
        start = end - length
        self.marker_start = self._base + start
        self._held, self._state = "", 0
        self._print(seen[:start], pieces)
        if action is Action.YIELD:
            self._base += start
            self._enter(Phase.ANSWER, strip=False)
            self._head = False  # the marker itself is the answer's first text
            return seen[start:]
        self._base += end
        if action is Action.SWALLOW:
            self._skip = self._skip or self._head
        else:
            self._enter(Phase.THINKING if action is Action.OPEN else Phase.ANSWER, strip=True)
        return seen[end:]

    def _enter(self, phase: Phase, *, strip: bool) -> None:
        self.phase, self._head, self._skip = phase, True, strip
        self._newlines, self._blanks = 0, []

    def _print(self, text: str, pieces: list[Piece]) -> None:
        if self._skip:
            text = text.lstrip("\n")
            self._skip = not text
        if not text:
            return
        if self.phase is Phase.THINKING:
            body = text.rstrip("\n")
            before, trailing = self._newlines, len(text) - len(body)
            self._newlines = trailing if body else before + trailing
            if body:
                pieces.append(Piece(self.phase, "\n" * before + body))
        elif self._head and text.isspace():
            self._blanks.append(text)
        else:
            pieces.append(Piece(self.phase, "".join((*self._blanks, text))))
            self._blanks = []
