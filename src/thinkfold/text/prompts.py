"""Turns messages or text into prompt tokens with the model's own template.

Knows tokenizer and template; knows nothing about HTTP, budgets or KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.text.control_tokens import ControlTokens
from thinkfold.text.messages import ROLES, Markers, Message, normalize, parse_messages
from thinkfold.text.tool_calls import ToolFormat, find_format
from thinkfold.text.vocabulary import Vocabulary

_CODE = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
# A normaliser may compose characters, so a token may stand for more of them than it shows.
_COMPOSITION = 4


class HasBackend(Protocol):
    """The part of a transformers fast tokenizer used here."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class PromptRenderer:
    """Encodes chats and texts. Thread-safe: nothing changes after construction.

    `tokenizer` is a transformers fast tokenizer (others: UnsupportedError). `normalize`
    makes line ends and trailing blanks of system and few-shot text uniform. `markers` are
    the family's thinking markers, used to read assistant messages.
    """

    def __init__(self, tokenizer: Any, *, normalize: bool, markers: Markers | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UnsupportedError("model", "needs a fast tokenizer (tokenizer.json)")
        self._template: HasBackend = tokenizer
        self._normalize = normalize
        self._markers = markers or Markers()
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._controls = ControlTokens(self._tokenizer)
        template = tokenizer.chat_template
        self._jinja: str = (template.get("default") if isinstance(template, dict) else template) or ""
        self._code = "\n".join(_CODE.findall(self._jinja))
        self._vocabulary = Vocabulary.from_tokenizer(tokenizer)
        self._longest_token = _longest_token(self._tokenizer)
        self._shows_calls, self._shows_results = self._shown_tool_parts()
        self._named_roles = self._roles_with_names()
        self.strips_thinking = self._strips_thinking()

    @property
    def source(self) -> str:
        """The folder or hub id that the tokenizer came from."""
        return str(getattr(self._template, "name_or_path", ""))

    @property
    def markers(self) -> Markers:
        """What opens and closes thinking in assistant messages."""
        return self._markers

    @property
    def has_template(self) -> bool:
        """Whether chats can be encoded."""
        return bool(self._jinja)

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the template reads `enable_thinking` or `thinking`."""
        return self._reads("enable_thinking") or self._reads("thinking")

    @property
    def shows_tools(self) -> bool:
        """Whether the template writes the tools into the prompt."""
        return self._reads("tools")

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if that is not known or special tokens hide it."""
        found = find_format(self._jinja)
        hidden = {self._vocabulary.token_bytes(i) for i in self._vocabulary.special_ids}
        return None if found is None or found.begin.encode() in hidden else found

    def encode_text(self, text: str, *, limit: int | None = None) -> list[int]:
        """Ids of raw text. Control tokens in it count as such; BOS as the tokenizer adds it.

        Raises ParameterError for lone surrogates, and for text that cannot fit `limit` tokens.
        """
        _check_unicode("prompt", text)
        self._check_length("prompt", len(text.strip()), limit)
        return self._tokenizer.encode(text).ids

    def encode_more(self, text: str) -> list[int]:
        """Ids of text that follows other tokens: no BOS. Raises ParameterError for lone surrogates."""
        _check_unicode("text", text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
        continue_final: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        limit: int | None = None,
        closes: bool = False,
    ) -> list[int]:
        """Ids of a chat, ready for the assistant to speak.

        An assistant message at the end is continued (prefill): with an open thinking block,
        or with reasoning and no content, inside thinking; otherwise in the answer.
        `continue_final` True demands such a message, False is refused where one stands.
        `closes`: the engine will end an open block at once, so one may stand where thinking is off.
        `limit` refuses, before any work, messages that cannot fit that many tokens. Raises
        ParameterError naming the message or field.
        """
        if not self.has_template:
            raise UnsupportedError("messages", "this model has no chat template; use /v1/completions")
        parsed = parse_messages(messages, self._markers)
        self._check_length("messages", sum(len((m.content or "").strip()) for m in parsed), limit)
        self._check_tool_parts(parsed)
        self._check_names(parsed)
        prefill = parsed.pop() if parsed[-1].role == "assistant" else None
        if continue_final and prefill is None:
            raise ParameterError("continue_final_message", "needs an assistant message at the end")
        if continue_final is False and prefill is not None:
            raise UnsupportedError("continue_final_message", "an assistant message at the end is always continued")
        if not parsed:
            raise ParameterError("messages", "an assistant message needs another message before it")
        if prefill is not None and prefill.tool_calls:
            raise UnsupportedError("messages", "the last message holds tool calls and cannot be continued")
        if self._normalize:
            parsed = normalize(parsed)
        if prefill is not None and prefill.reasoning is not None:
            if enable_thinking is False and prefill.content is None and not closes:
                raise ParameterError("messages", "the last message opens thinking, which is switched off")
            enable_thinking = True
        rendered = self._render(parsed, tools, self._switches(enable_thinking, reasoning_effort))
        if prefill is not None:
            rendered = self._continue(rendered, prefill)
        return self._controls.encode(rendered)

    def encode_history(
        self,
        messages: Sequence[Mapping[str, Any]],
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids that every chat begins with which goes on from `messages` with a user's message.

        That is what two such chats have in common. Raises ParameterError like `encode_chat`.
        """
        first, second = (
            self.encode_chat(
                [*messages, {"role": "user", "content": text}],
                enable_thinking=enable_thinking,
                tools=tools,
                reasoning_effort=reasoning_effort,
            )
            for text in ("a", "1")
        )
        pairs = enumerate(zip(first, second, strict=False))
        return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]

    def settled(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Checked messages as they are written once others follow them. Raises ParameterError."""
        parsed = parse_messages(messages, self._markers)
        return normalize([*parsed, Message("user", "")])[:-1] if self._normalize else parsed

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; of a character in several tokens, its part of it."""
        return self._vocabulary.token_bytes(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, markers included."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def _reads(self, variable: str) -> bool:
        return re.search(rf"(?<![\w.'\"]){variable}(?![\w'\"])", self._code) is not None

    def _switches(self, enable_thinking: bool | None, reasoning_effort: str | None) -> dict[str, Any]:
        switches: dict[str, Any] = {}
        if enable_thinking is not None:
            switches = {name: enable_thinking for name in ("enable_thinking", "thinking") if self._reads(name)}
        if reasoning_effort is not None and self._reads("reasoning_effort"):
            switches["reasoning_effort"] = reasoning_effort
        return switches

    def _check_length(self, field: str, chars: int, limit: int | None) -> None:
        if limit is None or self._longest_token is None:
            return
        at_least = chars // (self._longest_token * _COMPOSITION)
        if at_least > limit:
            raise ParameterError(field, f"the prompt has at least {at_least} tokens, the model's limit is {limit}")

    def _render(self, messages: list[Message], tools: Any, switches: dict[str, Any]) -> str:
        values = [self._template_values(m) for m in messages]
        tools = None if tools is None else self._escape(tools)
        try:
            return self._template.apply_chat_template(
                values, tools=tools, tokenize=False, add_generation_prompt=True, **switches
            )
        except Exception as error:  # a template is a program of the model's author: any error may come
            raise ParameterError("messages", f"the chat template refused them: {error}") from error

    def _shown_tool_parts(self) -> tuple[bool, bool]:
        """Whether the template writes tool calls, and tool results, into the prompt at all."""
        call = {"id": "call00000", "type": "function", "function": {"name": "ProbeCall", "arguments": {}}}
        result = Message("tool", "ProbeResult", name="ProbeCall", tool_call_id="call00000")
        chat = [Message("user", "q"), Message("assistant", None, tool_calls=(call,)), result]
        try:
            rendered = self._render(chat, None, {})
        except ParameterError:
            return True, True  # a strict template: it refuses by itself what it cannot show
        return "ProbeCall" in rendered, "ProbeResult" in rendered

    def _strips_thinking(self) -> bool:
        """Whether the template leaves an earlier answer's thinking out of the prompt."""
        user, thought = Message("user", "q"), Message("assistant", "ProbeAnswer", reasoning="ProbeThought")
        try:
            return "ProbeThought" not in self._render([user, thought, user], None, {})
        except ParameterError:
            return False

    def _roles_with_names(self) -> frozenset[str]:
        """Roles whose `name` the template writes into the prompt."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        user = Message("user", "q")
        before = {"assistant": [user], "tool": [user, Message("assistant", None, tool_calls=(call,))]}
        shown: set[str] = set()
        for role in ROLES:
            named = Message(role, "text", name="ProbeName", tool_call_id="call00000" if role == "tool" else None)
            chat = [*before.get(role, []), named] if role in ("user", "tool") else [*before.get(role, []), named, user]
            try:
                if "ProbeName" in self._render(chat, None, {}):
                    shown.add(role)
            except ParameterError:
                shown.add(role)  # a strict template: it refuses by itself what it cannot show
        return frozenset(shown)

    def _check_names(self, messages: list[Message]) -> None:
        for i, message in enumerate(messages):
            if message.name is None:
                continue
            if message.role not in self._named_roles:
                raise UnsupportedError(
                    f"messages[{i}].name", f"this model's chat template shows no names of role {message.role}"
                )
            if message.role == "assistant" and i == len(messages) - 1:
                raise UnsupportedError(f"messages[{i}].name", "the message that is continued cannot have a name")

    def _check_tool_parts(self, messages: list[Message]) -> None:
        for i, message in enumerate(messages):
            if message.tool_calls and not self._shows_calls:
                raise UnsupportedError(f"messages[{i}].tool_calls", "this model's chat template shows no tool calls")
            if message.role == "tool" and not self._shows_results:
                raise UnsupportedError(f"messages[{i}].role", "this model's chat template shows no tool results")

    def _template_values(self, message: Message) -> dict[str, Any]:
        role = message.role
        if role == "developer" and "developer" not in self._code:
            role = "system"
        values: dict[str, Any] = {"role": role, "content": self._escape(message.content or "")}
        if message.name is not None:
            values["name"] = self._escape(message.name)
        if message.tool_call_id is not None:
            values["tool_call_id"] = self._escape(message.tool_call_id)
        if message.tool_calls:
            values["tool_calls"] = self._escape(list(message.tool_calls))
        if message.reasoning is not None:
            self._give_reasoning(values, self._escape(message.reasoning), message.open_thinking)
        return values

    def _give_reasoning(self, values: dict[str, Any], reasoning: str, still_open: bool) -> None:
        names = [n for n in ("reasoning_content", "reasoning", "thinking") if re.search(rf"[.'\"]{n}\b", self._code)]
        for name in names:
            values[name] = reasoning
        if not names:  # such a template strips or keeps the block by its markers
            end = "" if still_open else f"\n{self._markers.end}\n\n"
            values["content"] = f"{self._markers.start}\n{reasoning}{end}{values['content']}"

    def _escape(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._controls.escape(value)
        if isinstance(value, Mapping):
            return {self._escape(k): self._escape(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(v) for v in value]
        return value

    def _continue(self, rendered: str, prefill: Message) -> str:
        start, end = self._markers.start, self._markers.end
        opened = rendered.rstrip().endswith(start)
        answer = self._escape(prefill.content or "")
        if prefill.reasoning is None:
            return f"{rendered}\n{end}\n\n{answer}" if opened else rendered + answer
        head = rendered if opened else f"{rendered}{start}\n"
        thinking = head + self._escape(prefill.reasoning)
        return thinking if prefill.content is None else f"{thinking}\n{end}\n\n{answer}"


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Most characters one token can stand for; None where unknown ones may vanish or fuse."""
    spec = json.loads(tokenizer.to_str())
    whole = spec["model"].get("byte_fallback") or "ByteLevel" in json.dumps(spec["pre_tokenizer"])
    if spec["model"].get("type") != "BPE" or not whole:
        return None
    return max((len(token) for token in tokenizer.get_vocab()), default=1)


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(field, f"holds a lone surrogate at character {error.start}") from None
