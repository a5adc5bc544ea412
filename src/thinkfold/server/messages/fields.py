"""Fields of a Messages request, and what they ask of thinking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from thinkfold.errors import ParameterError
from thinkfold.server.body import StrictModel
from thinkfold.server.fields import DecidingFields
from thinkfold.server.folds import FIELD_NAMES
from thinkfold.server.tools import FunctionFields, FunctionName, NamedTool, Tool, Toolbox, ToolChoice
from thinkfold.types import Grammar, SamplingParams, ThinkingParams

DEFAULT_EFFORT = "high"  # of adaptive thinking, as Anthropic documents it
NAMES = {  # the engine's names of fields -> the client's
    **FIELD_NAMES,
    "prompt": "messages",
    "stop": "stop_sequences",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}

TOOL_NAMES = {  # the words of chat completions -> the client's
    ".parameters": ".input_schema",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


class CacheControl(StrictModel):
    """A wish to cache the prompt up to here. Prompts are always cached, for no promised time."""

    type: Literal["ephemeral"]
    ttl: Literal["5m"] | None = None


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(StrictModel):
    user_id: str | None = None


class CustomTool(StrictModel):
    """A tool of the client's own. `strict` binds its input to the schema; without it the schema is a hint."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Literal[True] | None = None  # it always is

    def tool(self) -> Tool:
        """The same in the words of chat completions."""
        fields = {"name": self.name, "description": self.description, "strict": self.strict}
        return Tool(type="function", function=FunctionFields(**fields, parameters=self.input_schema))


class Choosing(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptFields(StrictModel):
    """What makes the prompt; all that `count_tokens` takes."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: Choosing | None = None
    # Understood and refused.
    mcp_servers: None = None
    context_management: None = None
    user_profile_id: None = None

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking blocks come without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def toolbox(self) -> Toolbox:
        """What the model may call. Raises ParameterError."""
        asked = self.tool_choice or Choosing(type="auto")
        if (asked.type == "tool") != (asked.name is not None):
            raise ParameterError("tool_choice.name", "goes with type tool")
        if not self.tools:
            return Toolbox(None, "required" if asked.type in ("any", "tool") else None, None)
        choices: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
        choice = choices.get(asked.type) or NamedTool(type="function", function=FunctionName(name=asked.name or ""))
        return Toolbox([each.tool() for each in self.tools], choice, not asked.disable_parallel_tool_use)

    def thinking_params(self, max_tokens: int | None = None) -> ThinkingParams:
        """The wish in the engine's terms: nobody thinks who was not asked to. Raises ParameterError."""
        asked = self.thinking or Thinking(type="disabled")
        effort = self.output_config.effort if self.output_config else None
        if asked.type != "enabled" and asked.budget_tokens is not None:
            raise ParameterError("thinking.budget_tokens", f"needs type enabled, not {asked.type}")
        if asked.type == "enabled":
            budget = _budget(asked.budget_tokens, max_tokens)
            return ThinkingParams(enabled=True, thinking_token_budget=budget, reasoning_effort=effort)
        if asked.type == "adaptive":
            return ThinkingParams(enabled=True, reasoning_effort=effort or DEFAULT_EFFORT)
        if asked.display is not None:
            raise ParameterError("thinking.display", "has no meaning while thinking is disabled")
        if effort is not None:
            raise ParameterError("output_config.effort", "needs thinking of type adaptive or enabled")
        return ThinkingParams(enabled=False)


class MessagesRequest(PromptFields, DecidingFields):
    max_tokens: int
    stop_sequences: list[str] | None = None
    # For the operator's own records; they change nothing here.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Understood and refused.
    container: None = None
    diagnostics: None = None
    inference_geo: None = None

    def answer_format(self) -> Grammar | None:
        """What the answer must match. Raises ParameterError."""
        form = self.output_config.format if self.output_config else None
        return Grammar.json_schema(form.schema_, "output_config.format.schema") if form else None

    def sampling_params(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Checked parameters; `defaults` (the model's own) stand in for what is not given."""
        return SamplingParams(
            **self.draws(defaults),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            grammar=self.grammar(),
        )


def _budget(budget: int | None, max_tokens: int | None) -> int:
    if budget is None:
        raise ParameterError("thinking.budget_tokens", "is missing")
    if budget < 1:
        raise ParameterError("thinking.budget_tokens", f"must be at least 1, got {budget}")
    if max_tokens is not None and budget >= max_tokens:
        raise ParameterError("thinking.budget_tokens", f"must be less than max_tokens ({max_tokens}), got {budget}")
    return budget
