"""Items: those of a request into chat messages, those of a reply out of its text.

A reasoning item holds the text of thinking. Its `encrypted_content` holds it, too, for clients that
keep nothing readable; only this server (or one with the same secret) opens it, for the same tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.conversation import Conversation
from thinkfold.server.keyring import Keyring
from thinkfold.server.parts import Part
from thinkfold.server.replies import TokenLogprob
from thinkfold.server.responses.shapes import CallItem, ItemStatus, MessageItem, ReasoningItem, ReasoningPart, TextPart

CALL_PREFIX = "call_"
_MESSAGE_KEYS = {"type", "role", "content", "id", "status"}
_CALL_KEYS = {"type", "id", "status", "call_id", "name", "arguments"}
_OUTPUT_KEYS = {"type", "id", "status", "call_id", "output"}
_REASONING_KEYS = {"type", "id", "status", "summary", "content", "encrypted_content"}
_PART_KEYS = {
    "input_text": {"type", "text"},
    "output_text": {"type", "text", "annotations", "logprobs"},
    "reasoning_text": {"type", "text"},
}


class ReasoningSeal:
    """Seals the reasoning of one tenant, and opens what comes back."""

    def __init__(self, keyring: Keyring, tenant: str) -> None:
        self._keyring = keyring
        self._context = ("responses", tenant)

    def seal(self, text: str) -> str:
        return self._keyring.seal(text, self._context)

    def open(self, where: str, sealed: Any) -> str:
        text = self._keyring.open(sealed, self._context) if isinstance(sealed, str) else None
        if text is None:
            raise ParameterError(where, "is not this server's, or it was changed; send back items as they came")
        return text


def reasoning_item(item_id: str, text: str | None, status: ItemStatus, encrypted: str | None) -> ReasoningItem:
    """A reasoning item; `text` None while it has no part yet."""
    content = [] if text is None else [reasoning_part(text)]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": encrypted,
        "status": status,
    }


def message_item(item_id: str, text: str | None, status: ItemStatus, logprobs: list[TokenLogprob]) -> MessageItem:
    """An assistant's message; `text` None while it has no part yet."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}


def call_item(item_id: str, call: Part, arguments: str, status: ItemStatus) -> CallItem:
    """A call of a tool."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": CALL_PREFIX + call.id,
        "name": call.name,
        "arguments": arguments,
        "status": status,
    }


def reasoning_part(text: str) -> ReasoningPart:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: list[TokenLogprob]) -> TextPart:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def add_input(conversation: Conversation, given: str | list[dict[str, Any]], seal: ReasoningSeal) -> None:
    """A request's input. Raises ParameterError that names the item."""
    if isinstance(given, str):
        conversation.add_text("input", "user", given)
        return
    if not given:
        raise ParameterError("input", "must hold at least one item")
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(conversation, where, item)
        elif kind == "reasoning":
            _check_keys(where, item, _REASONING_KEYS, "reasoning item")
            conversation.add_reasoning(where, _thinking_of(where, item, seal))
        elif kind == "function_call":
            _add_call(conversation, where, item)
        elif kind == "function_call_output":
            _check_keys(where, item, _OUTPUT_KEYS, "function call's output")
            call_id, output = _string(where, item, "call_id"), item.get("output")
            text = output if isinstance(output, str) else _parts(f"{where}.output", output, "input_text")
            conversation.add_result(where, f"{where}.call_id", call_id, text)
        else:
            known = "message, reasoning, function_call and function_call_output items"
            raise UnsupportedError(f"{where}.type", f"only {known} are supported, got {kind!r:.60}")


def _add_message(conversation: Conversation, where: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise ParameterError(f"{where}.role", f"must be user, assistant, system or developer, got {role!r:.60}")
    _check_keys(where, item, _MESSAGE_KEYS, "message")
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    text = content if isinstance(content, str) else _parts(f"{where}.content", content, kind)
    conversation.add_text(where, role, text)


def _add_call(conversation: Conversation, where: str, item: Mapping[str, Any]) -> None:
    _check_keys(where, item, _CALL_KEYS, "function call")
    call_id, name, arguments = (_string(where, item, field) for field in ("call_id", "name", "arguments"))
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ParameterError(f"{where}.arguments", "must be a JSON object in a string")
    conversation.add_call(where, call_id, name, arguments)


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ParameterError(f"{where}.{field}", "must be a string")
    return value


def _thinking_of(where: str, item: Mapping[str, Any], seal: ReasoningSeal) -> str:
    content, sealed = item.get("content"), item.get("encrypted_content")
    text = _parts(f"{where}.content", content, "reasoning_text") if content else None
    if sealed is None:
        if text is None:
            raise ParameterError(f"{where}.encrypted_content", "is missing, and so is content")
        return text
    opened = seal.open(f"{where}.encrypted_content", sealed)
    if text is not None and text != opened:
        raise ParameterError(f"{where}.content", "differs from encrypted_content")
    return opened


def _parts(where: str, content: Any, kind: str) -> str:
    """The text of parts of one kind."""
    if not isinstance(content, list):
        raise ParameterError(where, f"must be a string or a list of parts, got {type(content).__name__}")
    if not content:
        raise ParameterError(where, "must hold at least one part")
    texts: list[str] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        found = part.get("type") if isinstance(part, dict) else None
        if found != kind:
            raise UnsupportedError(f"{place}.type", f"only {kind} parts are supported here, got {found!r:.60}")
        _check_keys(place, part, _PART_KEYS[kind], "part")
        if part.get("annotations"):
            raise UnsupportedError(f"{place}.annotations", "are not supported")
        if not isinstance(part.get("text"), str):
            raise ParameterError(f"{place}.text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _check_keys(where: str, given: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = next((key for key, value in given.items() if key not in known and value is not None), None)
    if unknown is not None:
        raise UnsupportedError(f"{where}.{unknown!s:.60}", f"is not supported in a {what}")
