"""What `make demo` shows: thinking dimmed behind a bar, folds as they happen, the answer plainly."""

from __future__ import annotations

import os
import shutil
from typing import Any, TextIO


class Screen:
    """Writes thinking dimmed and indented behind a bar, segment by segment, and the answer plainly."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        colour = out.isatty() and "NO_COLOR" not in os.environ
        self._dim, self._bold, self._off = ("\x1b[2m", "\x1b[1m", "\x1b[0m") if colour else ("", "", "")
        self._width = min(100, shutil.get_terminal_size((100, 24)).columns) - 8
        self._column = 0
        self._line_is_empty = True  # of the model's line; a wrapped line has a column of 0 too
        self._blank = False
        self.segments = 0
        self.folds = 0

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def title(self, text: str) -> None:
        self.line(f"\n{self._bold}{text}{self._off}")

    def thinking(self, delta: str) -> None:
        """Show a piece of thinking; an empty line of the model's starts a new segment."""
        for char in delta:
            if char == "\n":
                self._blank = self._blank or self._line_is_empty
                self._line_is_empty = True
                self.end_thinking()
            else:
                self._put(char)
        self._out.flush()

    def answer(self, delta: str) -> None:
        self._out.write(delta)
        self._out.flush()

    def fold(self, fold: dict[str, Any]) -> None:
        """Show that a span of thinking was folded."""
        self.end_thinking()
        self.folds += not fold["refused"]
        span = f"thinking tokens {fold['start']}–{fold['end']}"
        error = "" if fold["error"] is None else f", estimated error {fold['error']:.2f}"
        if fold["refused"]:
            text = f"{span} stay raw{error}"
        else:
            tokens = fold["end"] - fold["start"]
            text = f"folded {span}: {tokens} → {fold['entries']:.0f} entries, {fold['pages_freed']} pages freed{error}"
        self.line(f"{self._bold}   ◆ {text}{self._off}")

    def end_thinking(self) -> None:
        """End the line on the screen, if one is open."""
        if self._column:
            self._out.write(f"{self._off}\n")
            self._column = 0

    def _put(self, char: str) -> None:
        if self._column == 0:
            if char == " ":
                return
            starts_segment = self._blank or self.segments == 0
            if starts_segment:
                self.segments += 1
                if self.segments > 1:
                    self._out.write(f"{self._dim}     │{self._off}\n")
            self._out.write(f"{self._dim}{self.segments if starts_segment else '':>4} │ ")
            self._blank = False
        self._out.write(char)
        self._column += 1
        self._line_is_empty = False
        if self._column >= self._width and char == " ":
            self.end_thinking()
