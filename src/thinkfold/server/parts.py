"""A choice's text as parts in order: thinking, text, calls of tools. For APIs whose replies are lists of such parts."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from thinkfold.server.reply import Run
from thinkfold.text.tool_calls import CallArguments, CallBegun, Content, ToolCallParser, ToolFormat
from thinkfold.types import Phase

INVALID = "INVALID_JSON"


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of thinking."""

    text: str


Event = Thought | Content | CallBegun | CallArguments


@dataclass(slots=True)
class Part:
    """A stretch of one kind. `name` and `id` are a call's, whose text are its arguments, as JSON."""

    kind: Literal["thinking", "text", "call"]
    name: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any]:
        """A call's arguments: half of them where the reply was cut, as clients read half a stream.

        What is no JSON object is wrapped in one, as Anthropic advises its clients to do.
        """
        try:
            value = from_json(self.text or "{}", allow_partial=True, allow_inf_nan=False)
        except ValueError:
            value = None
        return value if isinstance(value, dict) else {INVALID: self.text}


class PartReader:
    """Finds the calls in one choice's answer; thinking holds none. `calls` None looks for none."""

    def __init__(self, calls: ToolFormat | None) -> None:
        self._parser = ToolCallParser(calls) if calls is not None else None

    @property
    def calls(self) -> int:
        """How many have begun."""
        return self._parser.calls if self._parser is not None else 0

    def read(self, phase: Phase, text: str) -> list[Event]:
        """The events that the text of one phase completes."""
        if not text:
            return []
        if phase is Phase.THINKING:
            return [Thought(text)]
        return [Content(text)] if self._parser is None else list(self._parser.push(text))

    def flush(self) -> list[Event]:
        """The answer has ended."""
        return [] if self._parser is None else list(self._parser.flush())


def part_of(event: Event, last: Part | None) -> Part:
    """The part an event belongs to: the last one, or a new one."""
    if isinstance(event, CallBegun):
        return Part("call", event.name)
    kind = "thinking" if isinstance(event, Thought) else "text" if isinstance(event, Content) else "call"
    return last if last is not None and last.kind == kind else Part(kind)


def parts_of(runs: Iterable[Run], reader: PartReader) -> list[Part]:
    """The parts of a finished choice."""
    parts: list[Part] = []
    for event in _events(runs, reader):
        part = part_of(event, parts[-1] if parts else None)
        if not parts or part is not parts[-1]:
            parts.append(part)
        if not isinstance(event, CallBegun):
            part.pieces.append(event.text)
    return parts


def _events(runs: Iterable[Run], reader: PartReader) -> Iterator[Event]:
    for run in runs:
        yield from reader.read(run.phase, run.text)
    yield from reader.flush()
