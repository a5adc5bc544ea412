"""Content blocks: those of a request into chat messages, those of a reply out of its text.

A thinking block's signature proves that its text is ours. With `display: "omitted"` the block
has no text, and the signature holds it, sealed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.conversation import Conversation
from thinkfold.server.keyring import Keyring
from thinkfold.server.messages.fields import CacheControl, PromptFields
from thinkfold.server.reply import Run
from thinkfold.types import Phase

SEPARATOR = "\n\n"  # between text blocks, and between turns of one role
_TEXT_KEYS = {"type", "text", "cache_control", "citations"}


class ThinkingSeal:
    """Signs the thinking of one tenant, and checks what comes back."""

    def __init__(self, keyring: Keyring, tenant: str) -> None:
        self._keyring = keyring
        self._context = ("messages", tenant)

    def block(self, text: str, *, omitted: bool) -> dict[str, Any]:
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


def content_of(runs: list[Run], seal: ThinkingSeal, *, omitted: bool) -> list[dict[str, Any]]:
    """The blocks of a finished reply."""
    return [
        seal.block(run.text, omitted=omitted) if run.phase is Phase.THINKING else {"type": "text", "text": run.text}
        for run in runs
    ]


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
    """One turn's texts, joined; thinking comes before them."""
    origin = where.removesuffix(".content")
    if isinstance(content, str):
        conversation.join_text(origin, role, content, SEPARATOR)
        return
    if not isinstance(content, list):
        raise ParameterError(where, f"must be a string or a list of blocks, got {type(content).__name__}")
    if not content:
        raise ParameterError(where, "must hold at least one block")
    texts: list[str] = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text_of(place, block))
        elif kind == "thinking" and role == "assistant":
            if texts:
                raise UnsupportedError(place, "thinking must come before the text of its turn")
            conversation.add_reasoning(origin, seal.text_of(place, block))
        else:
            allowed = "text and thinking" if role == "assistant" else "text"
            raise UnsupportedError(f"{place}.type", f"only {allowed} blocks are supported here, got {kind!r:.60}")
    if texts:
        conversation.join_text(origin, role, SEPARATOR.join(texts), SEPARATOR)


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
