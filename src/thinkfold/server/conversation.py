"""Builds the renderer's chat messages from another API's, and tells its errors in that API's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from thinkfold.errors import ParameterError
from thinkfold.server.contract import Engine
from thinkfold.server.errors import renamed
from thinkfold.server.parts import Part
from thinkfold.server.tools import Toolbox
from thinkfold.server.turns import NextTurn
from thinkfold.text.tool_calls import ToolFormat
from thinkfold.types import ThinkingParams

_PLACE = re.compile(r"messages\[(\d+)\]")


class Conversation:
    """Chat messages, each with the name of the client's field it came from.

    Reasoning belongs to the assistant's text or calls that follow it. Without them it stands alone: at
    the end of a conversation such thinking is continued.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._origins: list[str] = []
        self.messages: list[dict[str, Any]] = []

    def add_text(self, where: str, role: str, text: str) -> None:
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and "reasoning" in last and "content" not in last:
            last["content"] = text
        else:
            self._add(where, {"role": role, "content": text})

    def join_text(self, where: str, role: str, text: str, separator: str) -> None:
        """Like `add_text`, but a text of the same role as the last message becomes a part of it."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == role and "content" in last and "tool_calls" not in last:
            last["content"] += separator + text
        else:
            self.add_text(where, role, text)

    def add_reasoning(self, where: str, text: str) -> None:
        last = self.messages[-1] if self.messages else {}
        if "reasoning" in last and not last.keys() & {"content", "tool_calls"}:
            last["reasoning"] += text
        else:
            self._add(where, {"role": "assistant", "reasoning": text})

    def add_call(self, where: str, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """A tool call; it goes with what the assistant said before it."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(where, {"role": "assistant"})
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.messages[-1]["tool_calls"] = [*self.messages[-1].get("tool_calls", ()), call]

    def add_result(self, where: str, field: str, call_id: str, text: str) -> None:
        """What a tool gave back. Raises ParameterError, which names `field`, where nothing called it."""
        calls = (call for message in self.messages for call in message.get("tool_calls", ()))
        if all(call["id"] != call_id for call in calls):
            raise ParameterError(field, f"there is no call {call_id!r:.60} before it")
        self._add(where, {"role": "tool", "tool_call_id": call_id, "content": text})

    def extend(self, where: str, messages: list[dict[str, Any]]) -> None:
        """Add copies of messages that were checked before."""
        for message in messages:
            self._add(where, dict(message))

    def extend_with(self, other: Conversation) -> None:
        """Add copies of another conversation's messages."""
        for where, message in zip(other._origins, other.messages, strict=True):
            self._add(where, dict(message))

    def add_reply(self, parts: Sequence[Part], call_prefix: str) -> None:
        """What the assistant said; it goes on where an assistant's message at the end stopped."""
        goes_on = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        for part in parts:
            last = self.messages[-1] if goes_on else {}
            goes_on = False
            if part.kind == "thinking":
                self.add_reasoning("output", part.text)
            elif part.kind == "call":
                self.add_call("output", call_prefix + part.id, part.name, part.arguments())
            elif "content" in last:
                last["content"] += part.text
            else:
                self.add_text("output", "assistant", part.text)

    def turn(self, thinking: ThinkingParams, toolbox: Toolbox, calls: ToolFormat | None) -> NextTurn:
        """What its next turn begins with, once the answer is there."""
        effort, begin = thinking.reasoning_effort, None if calls is None else calls.begin
        return NextTurn(list(self.messages), thinking.template_switch, effort, toolbox.for_template(), begin)

    def encode(self, engine: Engine, thinking: ThinkingParams, toolbox: Toolbox) -> list[int]:
        """The prompt's tokens. Raises ParameterError that names the client's field."""
        try:
            return engine.prompts.encode_chat(
                self.messages,
                enable_thinking=thinking.template_switch,
                tools=toolbox.for_template(),
                reasoning_effort=thinking.reasoning_effort,
                limit=engine.model.max_prompt_len,
                closes=thinking.spends_none and engine.model.budget_enforced,
            )
        except ParameterError as error:
            raise type(error)(self._named(error.field), error.message) from None

    def _add(self, where: str, message: dict[str, Any]) -> None:
        self._origins.append(where)
        self.messages.append(message)

    def _named(self, field: str) -> str:
        found = _PLACE.match(field)
        if found is None:
            return self._field if field == "messages" else field
        return self._origins[int(found[1])] + field[found.end() :]


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name fields as the client does; `names` as for `renamed`."""
    try:
        yield
    except ParameterError as error:
        raise renamed(error, names) from None
