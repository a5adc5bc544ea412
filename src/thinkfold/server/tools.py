"""Tools in the words of chat completions: checks, what the template gets, what binds the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.body import StrictModel
from thinkfold.text.json_schema import enforceable
from thinkfold.text.prompts import PromptRenderer
from thinkfold.text.tool_calls import ToolFormat
from thinkfold.types import ControlParams, Decision, Grammar, SamplingParams, schema_format

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class FunctionFields(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionFields


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Toolbox:
    """The tools of one request that the model may call. Raises ParameterError for wrong ones.

    `parallel`: it may call several in one answer.
    """

    def __init__(self, tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> None:
        _check(tools or [])
        if not tools and choice not in (None, "none"):
            raise ParameterError("tool_choice", "needs tools")
        if not tools and parallel is not None:
            raise ParameterError("parallel_tool_calls", "needs tools")
        self.tools = list(enumerate(tools)) if tools and choice != "none" else []
        self.parallel = parallel is not False
        self.must_call = choice == "required" or isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            self.tools = [(i, tool) for i, tool in self.tools if tool.function.name == choice.function.name]
            if not self.tools:
                raise ParameterError("tool_choice.function.name", "is none of the tools")
        self.shown = tools if self.tools else None

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates expect them; None for none."""
        return [tool.model_dump(exclude_none=True) for tool in self.shown] if self.shown else None

    def arm(self, sampling: SamplingParams, prompts: PromptRenderer) -> tuple[SamplingParams, ToolFormat | None]:
        """The parameters with what the tools add, and how calls look; None where none may come.

        Raises UnsupportedError for a model that cannot call tools.
        """
        if not self.tools:
            return sampling, None
        calls = known_format(prompts.tool_format, shown=prompts.shows_tools)
        return self.bind(sampling, calls), calls

    def control(self, params: ControlParams | None) -> ControlParams | None:
        """Beside tools only loops are stopped."""
        return replace(params or ControlParams(), task="tools") if self.tools else params

    def decision(self, how: Decision | None) -> Decision | None:
        """Raises ParameterError where answers with calls would be compared."""
        if how is not None and self.tools:
            raise ParameterError(how.field, "goes without tools: calls are not compared")
        return how

    def bind(self, sampling: SamplingParams, calls: ToolFormat) -> SamplingParams:
        """The parameters with what the tools add: a grammar, and the end after a single call."""
        answer = None if sampling.grammar is None else json.loads(sampling.grammar.format)
        format_ = self._format(calls, answer)
        stop = sampling.stop if self.parallel or calls.end in sampling.stop else (*sampling.stop, calls.end)
        field = "tools" if self.must_call or sampling.grammar is None else sampling.grammar.field
        return replace(sampling, stop=stop, grammar=None if format_ is None else Grammar.of(format_, field))

    def _format(self, calls: ToolFormat, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """Calls only, calls or `answer`, or text with strict calls in it; None binds nothing."""
        tags = [_tag(i, tool, calls) for i, tool in self.tools]
        only = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        only["stop_after_first"] = not self.parallel
        if self.must_call:
            return only
        if answer is not None:
            return {"type": "or", "elements": [answer, only]}
        if not any(tool.function.strict for _, tool in self.tools):
            return None
        return {
            "type": "triggered_tags",
            "triggers": [calls.begin],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": not self.parallel,
        }


@contextmanager
def flat_names(words: Mapping[str, str]) -> Iterator[None]:
    """Errors inside name fields of tools as APIs do that put no `function` around them; `words` replace others."""
    try:
        yield
    except ParameterError as error:
        name = error.field.replace(".function", "", 1)
        for ours, theirs in words.items():
            name = name.replace(ours, theirs, 1)
        raise type(error)(name, error.message) from None


def _tag(index: int, tool: Tool, calls: ToolFormat) -> dict[str, Any]:
    function = tool.function
    begin, end = calls.frame(function.name)
    schema: Any = {"type": "object", **(function.parameters or {"properties": {}})}
    try:
        schema = enforceable(schema, f"tools[{index}].function.parameters")
    except ParameterError:
        if function.strict:
            raise
        schema = {"type": "object", "additionalProperties": True}  # not strict: a hint for the model, as at OpenAI
    return {"type": "tag", "begin": begin, "content": schema_format(schema), "end": end}


def _check(tools: list[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise ParameterError("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{i}].function.name"
        if _NAME.fullmatch(name) is None:
            raise ParameterError(where, "must be 1 to 64 letters, digits, dots, dashes or underscores")
        if name in names:
            raise ParameterError(where, f"{name!r} is there twice")
        names.add(name)


def known_format(format_: ToolFormat | None, *, shown: bool) -> ToolFormat:
    """The family's way to write calls. Raises UnsupportedError where tools cannot work."""
    if not shown:
        raise UnsupportedError("tools", "this model's chat template shows no tools")
    if format_ is None:
        raise UnsupportedError("tools", "how this model's family writes tool calls is not known here")
    return format_
