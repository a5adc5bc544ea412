"""Content blocks: those of a request into chat messages, those of a reply out of its text.

A thinking block's signature proves that its text is ours. With `display: "omitted"` the block
has no text, and the signature holds it, sealed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.conversation import Conversation
from thinkfold.server.keyring import Keyring
from thinkfold.server.messages.fields import CacheControl, PromptFields
from thinkfold.server.messages.shapes import Block, ThinkingBlock, ToolUseBlock
from thinkfold.server.parts import Part

SEPARATOR = "\n\n"  # between text blocks, and between turns of one role
CALL_PREFIX = "toolu_"
_CALL_KEYS = {"type", "id", "name", "input", "cache_control"}
_RESULT_KEYS = {"type", "tool_use_id", "content", "is_error", "cache_control"}
_TEXT_KEYS = {"type", "text", "cache_control", "citations"}


class ThinkingSeal:
    """Signs the thinking of one tenant, and checks what comes back."""

    def __init__(self, keyring: Keyring, tenant: str) -> None:
        self._keyring = keyring
        self._context = ("messages", tenant)

    def block(self, text: str, *, omitted: bool) -> ThinkingBlock:
        """The thinking block of `text`."""
        return {"type": "thinking", "thinking": "" if omitted else text, "signature": self.signature(text, omitted)}

    def signature(self, text: str, omitted: bool) -> str:
        sign = self._keyring.seal if omitted else self._keyring.sign
        return sign(text, self._context)

    def text_of(self, where: str, block: Mapping[str, Any]) -> str:
        """The thinking of a block of ours. Raises ParameterError for any other."""
        unknown = next((key for key in block if key not in ("type", "thinking", "signature")), None)
        if unknown is not None:
            raise UnsupportedError(f"{where}.{unknown!s:.60}", "is not supported in a thinking block")
        text, signature = block.get("thinking"), block.get("signature")
        if not isinstance(text, str):
            raise ParameterError(f"{where}.thinking", "must be a string")
        if not isinstance(signature, str):
            raise ParameterError(f"{where}.signature", "must be a string")
        if text and self._keyring.is_signed(signature, text, self._context):
            return text
        sealed = self._keyring.open(signature, self._context) if not text else None
        if sealed is None:
            raise ParameterError(
                f"{where}.signature", "is not this server's, or the block was changed; send back blocks as they came"
            )
        return sealed


def content_of(parts: Sequence[Part], seal: ThinkingSeal, *, omitted: bool) -> list[Block]:
    """The blocks of a finished reply."""
    return [_block_of(part, seal, omitted) for part in parts]


def _block_of(part: Part, seal: ThinkingSeal, omitted: bool) -> Block:
    if part.kind == "thinking":
        return seal.block(part.text, omitted=omitted)
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {**call_block(part), "input": part.arguments()}


def call_block(part: Part) -> ToolUseBlock:
    """A call as it begins."""
    return {"type": "tool_use", "id": CALL_PREFIX + part.id, "name": part.name, "input": {}}


def conversation_of(fields: PromptFields, seal: ThinkingSeal) -> Conversation:
    """System prompt and messages. Raises ParameterError that names the block."""
    conversation = Conversation("messages")
    if fields.system is not None:
        _add_turn(conversation, "system", "system", fields.system, seal)
    if not fields.messages:
        raise ParameterError("messages", "must hold at least one message")
    for i, message in enumerate(fields.messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise ParameterError(f"{where}.role", f"must be user or assistant, got {role!r:.60}")
        unknown = next((key for key in message if key not in ("role", "content")), None)
        if unknown is not None:
            raise UnsupportedError(f"{where}.{unknown!s:.60}", "is not supported in a message")
        _add_turn(conversation, f"{where}.content", role, message.get("content"), seal)
    return conversation


def _add_turn(conversation: Conversation, where: str, role: str, content: Any, seal: ThinkingSeal) -> None:
    """One turn: an assistant's thinking, its texts, joined, its calls; results of tools, then a user's texts."""
    origin = where.removesuffix(".content")
    if isinstance(content, str):
        conversation.join_text(origin, role, content, SEPARATOR)
        return
    if not isinstance(content, list):
        raise ParameterError(where, f"must be a string or a list of blocks, got {type(content).__name__}")
    if not content:
        raise ParameterError(where, "must hold at least one block")
    texts: list[str] = []
    calls: list[tuple[str, str, Mapping[str, Any]]] = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text_of(place, block))
        elif kind == "thinking" and role == "assistant":
            if texts or calls:
                raise UnsupportedError(place, "thinking must come before the text and the calls of its turn")
            conversation.add_reasoning(origin, seal.text_of(place, block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call_of(place, block))
        elif kind == "tool_result" and role == "user":
            if texts:
                raise UnsupportedError(place, "results of tools must come before the text of their turn")
            conversation.add_result(origin, f"{place}.tool_use_id", *_result_of(place, block))
        else:
            allowed = {"assistant": "text, thinking and tool_use", "user": "text and tool_result"}.get(role, "text")
            raise UnsupportedError(f"{place}.type", f"only {allowed} blocks are supported here, got {kind!r:.60}")
    if texts:
        conversation.join_text(origin, role, SEPARATOR.join(texts), SEPARATOR)
    for call in calls:
        conversation.add_call(origin, *call)


def _call_of(where: str, block: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    _check_keys(where, block, _CALL_KEYS, "tool_use")
    for field in ("id", "name"):
        if not isinstance(block.get(field), str):
            raise ParameterError(f"{where}.{field}", "must be a string")
    if not isinstance(block.get("input"), dict):
        raise ParameterError(f"{where}.input", "must be an object")
    return block["id"], block["name"], block["input"]


def _result_of(where: str, block: Mapping[str, Any]) -> tuple[str, str]:
    """The id of the call, and what came of it. Templates have no place for `is_error`: the text says it."""
    _check_keys(where, block, _RESULT_KEYS, "tool_result")
    call_id, content, is_error = block.get("tool_use_id"), block.get("content"), block.get("is_error")
    if not isinstance(call_id, str):
        raise ParameterError(f"{where}.tool_use_id", "must be a string")
    if not isinstance(is_error, bool | None):
        raise ParameterError(f"{where}.is_error", "must be true or false")
    if isinstance(content, list):
        content = SEPARATOR.join(_result_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif not isinstance(content, str | None):
        raise ParameterError(f"{where}.content", "must be a string or a list of blocks")
    return call_id, f"Error: {content or ''}" if is_error else content or ""


def _result_text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise UnsupportedError(f"{where}.type", f"only text blocks are supported here, got {kind!r:.60}")
    return _text_of(where, block)


def _check_keys(where: str, block: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = next((key for key, value in block.items() if key not in known and value is not None), None)
    if unknown is not None:
        raise UnsupportedError(f"{where}.{unknown!s:.60}", f"is not supported in a {what} block")
    if block.get("cache_control") is not None:
        _check_cache_control(f"{where}.cache_control", block["cache_control"])


def _text_of(where: str, block: Mapping[str, Any]) -> str:
    unknown = next((key for key in block if key not in _TEXT_KEYS), None)
    if unknown is not None or block.get("citations"):
        raise UnsupportedError(f"{where}.{unknown or 'citations'!s:.60}", "is not supported in a text block")
    text = block.get("text")
    if not isinstance(text, str):
        raise ParameterError(f"{where}.text", "must be a string")
    if block.get("cache_control") is not None:
        _check_cache_control(f"{where}.cache_control", block["cache_control"])
    return text


def _check_cache_control(where: str, value: Any) -> None:
    """Raise UnsupportedError for anything but an ephemeral breakpoint of the default time."""
    try:
        CacheControl.model_validate(value)
    except ValueError:
        raise UnsupportedError(where, 'must be {"type": "ephemeral"}; longer times cannot be promised') from None
