"""Builds the renderer's chat messages from another API's, and tells its errors in that API's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from thinkfold.errors import ParameterError
from thinkfold.server.contract import Engine
from thinkfold.server.errors import renamed
from thinkfold.server.reply import Run
from thinkfold.server.turns import NextTurn
from thinkfold.types import Phase, ThinkingParams

_PLACE = re.compile(r"messages\[(\d+)\]")


class Conversation:
    """Chat messages, each with the name of the client's field it came from.

    Reasoning belongs to the assistant's text that follows it. Without a text it stands alone: at
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
        if last.get("role") == role and "content" in last:
            last["content"] += separator + text
        else:
            self.add_text(where, role, text)

    def add_reasoning(self, where: str, text: str) -> None:
        last = self.messages[-1] if self.messages else {}
        if "reasoning" in last and "content" not in last:
            last["reasoning"] += text
        else:
            self._add(where, {"role": "assistant", "reasoning": text})

    def extend(self, where: str, messages: list[dict[str, Any]]) -> None:
        """Add copies of messages that were checked before."""
        for message in messages:
            self._add(where, dict(message))

    def extend_with(self, other: Conversation) -> None:
        """Add copies of another conversation's messages."""
        for where, message in zip(other._origins, other.messages, strict=True):
            self._add(where, dict(message))

    def add_reply(self, runs: Sequence[Run]) -> None:
        """What the assistant said; it goes on where an assistant's message at the end stopped."""
        goes_on = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        for run in runs:
            last = self.messages[-1] if goes_on else {}
            goes_on = False
            if run.phase is Phase.THINKING:
                self.add_reasoning("output", run.text)
            elif "content" in last:
                last["content"] += run.text
            else:
                self.add_text("output", "assistant", run.text)

    def turn(self, thinking: ThinkingParams) -> NextTurn:
        """What its next turn begins with, once the answer is there."""
        return NextTurn(list(self.messages), thinking.template_switch, thinking.reasoning_effort)

    def encode(self, engine: Engine, thinking: ThinkingParams) -> list[int]:
        """The prompt's tokens. Raises ParameterError that names the client's field."""
        try:
            return engine.prompts.encode_chat(
                self.messages,
                enable_thinking=thinking.template_switch,
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
