"""Tool calls in an answer's text, found while it grows. Knows no API and no tools.

How a family writes calls is one entry of `FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `begin`, a JSON object with name and arguments, `end`.

    It applies to a model whose chat template holds every string of `evidence` and none of
    `counter`. `frame(name)` is the text around a call's arguments.
    """

    name: str
    begin: str
    end: str
    evidence: tuple[str, ...]
    counter: tuple[str, ...]
    frame: Callable[[str], tuple[str, str]]


def _hermes_frame(name: str) -> tuple[str, str]:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"


FORMATS = (
    ToolFormat(
        "hermes",  # Nous Hermes 2 Pro; Qwen2.5, Qwen3, QwQ and many others
        "<tool_call>",
        "</tool_call>",
        evidence=("<tool_call>", "arguments"),
        counter=("<function=", "<arg_key>"),  # other families put other things between the same markers
        frame=_hermes_frame,
    ),
)


def find_format(template: str) -> ToolFormat | None:
    """How a model with this chat template writes calls; None if that is not known."""
    for format_ in FORMATS:
        if all(s in template for s in format_.evidence) and not any(s in template for s in format_.counter):
            return format_
    return None


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of `name`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, JSON text."""

    index: int
    text: str


Event = Content | CallBegun | CallArguments

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ToolCallParser:
    """Splits one answer into content and calls. Arguments flow as soon as a call's name is known.

    What looks like a call and is none (no JSON, no name) comes back as content. Blanks between
    content and calls are dropped.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._held = ""  # text that may begin a call; inside one: its body so far
        self._read = self._text
        self._blanks = ""
        self._started = False  # content or a call has been seen
        self._arguments = _ObjectEnd()
        self.calls = 0

    def push(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        self._held += text
        events: list[Event] = []
        while True:
            state, held = self._read, len(self._held)
            events += self._read()
            if self._read == state and len(self._held) in (0, held):
                return events

    def flush(self) -> list[Event]:
        """The answer has ended."""
        held, self._held = self._held, ""
        if self._read == self._text:
            return list(self._content(held))
        if self._read == self._head:
            return list(self._whole(held, ended=False))
        return []

    def _text(self) -> Iterator[Event]:
        before, found, after = self._held.partition(self._format.begin)
        if found:
            yield from self._content(before)
            self._blanks, self._held, self._read = "", after, self._head
            return
        keep = _overlap(self._held, self._format.begin)
        free = len(self._held) - keep
        text, self._held = self._held[:free], self._held[free:]
        yield from self._content(text)

    def _content(self, text: str) -> Iterator[Event]:
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if self.calls and not self._started:
            kept = kept.lstrip()
        if kept:
            self._started = True
            yield Content(kept)

    def _head(self) -> Iterator[Event]:
        head = _HEAD.match(self._held)
        if head is not None:
            self._held, self._read = self._held[head.end() :], self._object
            yield self._begin(json.loads(head[1], strict=False))
            return
        body, found, after = self._held.partition(self._format.end)
        if found:
            self._held, self._read = after, self._text
            yield from self._whole(body, ended=True)

    def _object(self) -> Iterator[Event]:
        end = self._arguments.find(self._held)
        text, self._held = self._held[:end], self._held[end:]
        if self._arguments.done:
            self._read, self._arguments = self._tail, _ObjectEnd()
        if text:
            yield CallArguments(self.calls - 1, text)

    def _tail(self) -> Iterator[Event]:
        _, found, after = self._held.partition(self._format.end)
        if found:
            self._held, self._read = after, self._text
        yield from ()

    def _begin(self, name: str) -> CallBegun:
        self.calls += 1
        self._started = False
        return CallBegun(self.calls - 1, name)

    def _whole(self, body: str, *, ended: bool) -> Iterator[Event]:
        """A call whose arguments could not flow."""
        call = _call(body)
        if call is None:
            yield from self._content(self._format.begin + body + (self._format.end if ended else ""))
            return
        begun = self._begin(call[0])
        yield begun
        yield CallArguments(begun.index, call[1])


class _ObjectEnd:
    """Finds the end of one JSON object in pieces of text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def find(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return i + 1
        return len(text)


def _call(body: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call's body; None if it is no call."""
    try:
        call: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return call["name"], arguments or "{}"
    return call["name"], json.dumps(arguments or {}, ensure_ascii=False)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
