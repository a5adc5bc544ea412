"""What an answer must match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinkfold.errors import ParameterError

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_WHITESPACE = 16  # characters between two parts of JSON: some models never stop writing blanks


def schema_format(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """JSON that satisfies `schema`, as a part of a format."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language of an answer; thinking is free. Raises ParameterError.

    `format` is JSON text in the structural-tag language of xgrammar: `{"type": "json_schema",
    "json_schema": …}`, `{"type": "regex", "pattern": …}` and so on. `field` is the name that
    errors use.
    """

    format: str
    field: str = "grammar"

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or not self.format:
            raise ParameterError(self.field, "must be a non-empty string")
        if len(self.format) > MAX_GRAMMAR_CHARS:
            raise ParameterError(self.field, f"has {len(self.format)} characters, the limit is {MAX_GRAMMAR_CHARS}")

    @classmethod
    def of(cls, format: Mapping[str, Any], field: str = "grammar") -> Grammar:
        """From the format as an object. Raises ParameterError for what JSON cannot hold."""
        try:
            return cls(json.dumps(format, allow_nan=False), field)
        except (ValueError, TypeError, RecursionError) as error:
            raise ParameterError(field, f"cannot be written as JSON ({error})") from None

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, field: str = "json_schema") -> Grammar:
        """JSON that satisfies `schema`; properties come in the order of the schema."""
        return cls.of(schema_format(schema), field)

    @classmethod
    def json_object(cls, field: str = "json_object") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object", "additionalProperties": True}, field)

    @classmethod
    def regex(cls, pattern: str, field: str = "regex") -> Grammar:
        """Text that `pattern` matches as a whole."""
        return cls.of({"type": "regex", "pattern": pattern}, field)

    @classmethod
    def ebnf(cls, text: str, field: str = "ebnf") -> Grammar:
        """Text of the rule `root` of a grammar in GBNF notation."""
        return cls.of({"type": "grammar", "grammar": text}, field)
