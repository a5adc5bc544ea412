"""Checks chat messages and brings them into one form. Knows no template and no tokenizer.

Raises ParameterError that names the message and its field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinkfold.errors import ParameterError, UnsupportedError

MAX_NESTING = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


@dataclass(frozen=True, slots=True)
class Markers:
    """Text that opens and closes thinking in a model's family."""

    start: str = "<think>"
    end: str = "</think>"


@dataclass(frozen=True, slots=True)
class Message:
    """One checked message. `content` None only for an assistant without a text.

    `open_thinking`: the reasoning was opened in the text and not closed.
    """

    role: str
    content: str | None
    reasoning: str | None = None
    open_thinking: bool = False
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None


def parse_messages(messages: Any, markers: Markers) -> list[Message]:
    """Checked messages; thinking written inside an assistant's text is taken out of it."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ParameterError("messages", "must be a list of messages")
    if not messages:
        raise ParameterError("messages", "must hold at least one message")
    return [_parse_message(f"messages[{i}]", raw, markers) for i, raw in enumerate(messages)]


def last_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last user message of a checked chat; empty without one."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return _content("messages", asked[-1]) or "" if asked else ""


def normalize(messages: list[Message]) -> list[Message]:
    """Line ends and trailing blanks of lines made uniform in system and few-shot text.

    System text everywhere, user and assistant text before the last user message. The last
    user message, what follows it, and tool results are never touched.
    """
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    return [
        replace(m, content=_uniform(m.content))
        if m.content is not None and (m.role in ("system", "developer") or (i < last_user and m.role != "tool"))
        else m
        for i, m in enumerate(messages)
    ]


def _uniform(text: str) -> str:
    return "\n".join(line.rstrip(" \t") for line in text.replace("\r\n", "\n").split("\n"))


def _parse_message(where: str, raw: Any, markers: Markers) -> Message:
    if not isinstance(raw, Mapping):
        raise ParameterError(where, "must be an object with role and content")
    given = {key: value for key, value in raw.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ParameterError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {role!r:.60}")
    unknown = next((key for key in given if key not in _FIELDS[role]), None)
    if unknown is not None:
        raise UnsupportedError(f"{where}.{unknown!s:.60}", f"is not supported in a message of role {role}")
    message = Message(
        role=role,
        content=_content(where, given.get("content")),
        reasoning=_reasoning(where, given),
        name=_text(f"{where}.name", given.get("name")),
        tool_calls=_tool_calls(where, given.get("tool_calls")),
        tool_call_id=_text(f"{where}.tool_call_id", given.get("tool_call_id")),
    )
    if role == "assistant":
        message = _split_thinking(where, message, markers)
    if message.content is None and message.reasoning is None and not message.tool_calls:
        raise ParameterError(f"{where}.content", "is missing")
    return message


def _text(where: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ParameterError(where, f"must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(where, f"holds a lone surrogate at character {error.start}") from None
    return value


def _content(where: str, value: Any) -> str | None:
    if not isinstance(value, list | tuple):
        return _text(f"{where}.content", value)
    if not value:
        raise ParameterError(f"{where}.content", "must hold at least one part")
    return "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(value))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise UnsupportedError(f"{where}.type", f"only text parts are supported, got {kind!r:.60}")
    text = _text(f"{where}.text", part.get("text"))
    if text is None:
        raise ParameterError(f"{where}.text", "is missing")
    unknown = next((key for key in part if key not in ("type", "text")), None)
    if unknown is not None:
        raise UnsupportedError(f"{where}.{unknown!s:.60}", "is not supported in a text part")
    return text


def _reasoning(where: str, given: Mapping[str, Any]) -> str | None:
    texts = [_text(f"{where}.{name}", given.get(name)) for name in ("reasoning", "reasoning_content")]
    if None not in texts and texts[0] != texts[1]:
        raise ParameterError(f"{where}.reasoning", "differs from reasoning_content; give one of them")
    return texts[0] if texts[0] is not None else texts[1]


def _split_thinking(where: str, message: Message, markers: Markers) -> Message:
    text = message.content
    if text is None or not text.lstrip().startswith(markers.start):
        return message
    reasoning, closed, answer = text.lstrip()[len(markers.start) :].partition(markers.end)
    if message.reasoning is not None and message.reasoning.strip() != reasoning.strip():
        raise ParameterError(f"{where}.reasoning", f"differs from the {markers.start} block in content")
    return replace(
        message,
        reasoning=reasoning.strip("\n") if closed else reasoning.lstrip("\n"),
        content=answer.lstrip("\n") if closed else None,
        open_thinking=not closed,
    )


def _tool_calls(where: str, calls: Any) -> tuple[dict[str, Any], ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise ParameterError(f"{where}.tool_calls", "must be a list")
    return tuple(_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls))


def _check_json(where: str, value: Any, depth: int) -> None:
    """Refuse what a template would fail on: deep nesting, lone surrogates, NaN and infinities."""
    if depth == 0:
        raise ParameterError(where, f"is nested more than {MAX_NESTING} deep")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            _check_json(where, part, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(where, "holds a number that JSON does not know")
    elif isinstance(value, str):
        _text(where, value)


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ParameterError(f"{where}.function", "must be an object with name and arguments")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(_text(f"{where}.function.arguments", arguments) or "{}")
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{where}.function.arguments", f"is not valid JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise ParameterError(f"{where}.function.arguments", "must be a JSON object")
    _check_json(f"{where}.function.arguments", arguments, MAX_NESTING)
    name = _text(f"{where}.function.name", function["name"])
    identity = _text(f"{where}.id", call.get("id"))
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
