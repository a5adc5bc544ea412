"""What an answer must match, as bodies say it: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from thinkfold.errors import ParameterError
from thinkfold.server.body import StrictModel
from thinkfold.types import Grammar, schema_format


class JsonSchemaFields(StrictModel):
    """`strict` changes nothing: a schema always binds."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None

    def format(self) -> dict[str, Any] | None:
        """The format of the answer; None for free text. Raises ParameterError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ParameterError("response_format.json_schema", "goes with type json_schema")
        if self.json_schema is not None:
            return schema_format(self.json_schema.schema_)
        return schema_format({"type": "object", "additionalProperties": True}) if self.type == "json_object" else None

    @property
    def field(self) -> str:
        """The name that errors about the format use."""
        return "response_format.json_schema.schema" if self.json_schema else "response_format"


class StructuredOutputs(StrictModel):
    """Exactly one of them."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def answer_grammar(self) -> Grammar:
        """Raises ParameterError."""
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ParameterError("structured_outputs", "needs exactly one of json, regex, choice, grammar")
        field = f"structured_outputs.{given[0].rstrip('_')}"
        if self.json_ is not None:
            return Grammar.json_schema(self.json_, field)
        if self.regex is not None:
            return Grammar.regex(self.regex, field)
        if self.grammar is not None:
            return Grammar.ebnf(self.grammar, field)
        if not self.choice or not all(self.choice):
            raise ParameterError(field, "must hold non-empty strings")
        words = [{"type": "const_string", "value": word} for word in dict.fromkeys(self.choice)]
        return Grammar.of({"type": "or", "elements": words} if len(words) > 1 else words[0], field)
