"""Fields of a Responses request. Null means not given, except for thinking budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.body import StrictModel
from thinkfold.server.fields import DecidingFields
from thinkfold.server.folds import FIELD_NAMES
from thinkfold.server.policy import Effort, ThinkingFields, agreed
from thinkfold.server.tools import FunctionFields, FunctionName, NamedTool, Tool, Toolbox
from thinkfold.types import Grammar, SamplingParams

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


class Reasoning(StrictModel):
    effort: Effort | None = None
    # The text of thinking is sent itself; nobody summarises it.
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    context: None = None


class FunctionTool(StrictModel):
    """`strict` binds the call's arguments to the schema; without it the schema is a hint."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The same in the words of chat completions."""
        return Tool(type="function", function=FunctionFields(**self.model_dump(exclude={"type"})))


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: str


class TextFormat(StrictModel):
    """`strict` changes nothing: a schema always binds."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: None = None


class StreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(ThinkingFields, DecidingFields):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    stream_options: StreamOptions | None = None
    # For the operator's own records; they change nothing here.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    # Understood and refused: only null or the value that asks for nothing.
    max_tool_calls: None = None
    background: Literal[False] | None = None
    background_options: None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    prompt_cache_options: None = None
    context_management: None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    image: None = None
    access_programs: None = None

    def check(self) -> None:
        """Raise ParameterError for what single fields cannot show."""
        if self.tools and self.wants(LOGPROBS):
            raise UnsupportedError("include", f"{LOGPROBS} goes without tools: which text a call begins in is not kept")
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "needs stream: true")

    @property
    def names(self) -> dict[str, str]:
        """The engine's names of fields -> the client's."""
        names = {
            **FIELD_NAMES,
            **self.vote_names,
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }
        by_object = self.reasoning is not None and self.reasoning.effort is not None
        return names | ({"reasoning_effort": "reasoning.effort"} if by_object else {})

    def answer_format(self) -> Grammar | None:
        """What the answer must match. Raises ParameterError."""
        form = self.text.format if self.text else None
        if form is None:
            return None
        if (form.type == "json_schema") != (form.schema_ is not None):
            raise ParameterError("text.format.schema", "goes with type json_schema")
        if form.schema_ is not None:
            return Grammar.json_schema(form.schema_, "text.format.schema")
        return Grammar.json_object("text.format") if form.type == "json_object" else None

    def toolbox(self) -> Toolbox:
        """What the model may call. Raises ParameterError."""
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        if self.tools:
            return Toolbox([each.tool() for each in self.tools], choice, self.parallel_tool_calls)
        return Toolbox(None, None if choice == "auto" else choice, None)

    def effort(self) -> Effort | None:
        within = self.reasoning.effort if self.reasoning else None
        given = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": within}
        return agreed({name: effort for name, effort in given.items() if effort is not None})

    def wants(self, extra: str) -> bool:
        return extra in (self.include or ())

    def num_logprobs(self) -> int | None:
        """Alternatives to keep a token; None for no log-probabilities."""
        if self.wants(LOGPROBS):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ParameterError("top_logprobs", f"needs include: [{LOGPROBS!r}]")
        return None

    def sampling_params(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Checked parameters; `defaults` (the model's own) stand in for what is not given."""
        return SamplingParams(
            **self.draws(defaults),
            max_tokens=self.max_output_tokens,
            logprobs=self.num_logprobs(),
            grammar=self.grammar(),
        )
