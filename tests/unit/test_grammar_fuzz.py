"""Whatever a client sends as tools, formats or schemas: an answer or a named refusal, never a failure."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_stand_in import EOS, ScriptedEngine, chat, serving
from tiny_tokenizer import TOOL_TEMPLATE, build_tokenizer

from thinkfold.errors import ParameterError
from thinkfold.text.grammar import Grammars
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.types import Grammar

WORDS = [
    "type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "additionalProperties", "prefixItems",
    "minItems", "uniqueItems", "object", "string", "integer", "array", "name", "function", "json_schema", "schema",
    "json_object", "text", "strict", "parameters", "auto", "none", "#/$defs/a", "date", "^a$", "regex", "choice",
    "json",
]  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=4)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@functools.cache
def grammars() -> Grammars:
    vocabulary = Vocabulary.from_tokenizer(build_tokenizer())
    return Grammars(vocabulary, vocabulary.size)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=4))
@example({"format": []})
@example({"type": "string", "minLength": True})
@example({"type": "string", "maxLength": 2.5})
@example({"properties": [], "type": "object"})
@example({"type": {"a": 1}})
@example({"enum": {}})
@example({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
@example({"type": "integer", "multipleOf": 0})
@example({"type": "integer", "minimum": 1e308})
@example({"type": "string", "pattern": "\ud800"})
def test_schemas_compile_or_are_refused_by_name(schema: dict[str, Any]) -> None:
    compiled, field = None, "f"
    try:
        compiled = grammars().compile(Grammar.json_schema(schema, "f"))
    except ParameterError as error:
        field = error.field
    assert field.startswith("f")
    assert compiled is None or grammars().matcher(compiled)


@settings(max_examples=120, deadline=None)
@given(field=st.sampled_from(["tools", "tool_choice", "response_format", "structured_outputs"]), value=VALUES)
async def test_bodies_are_answered_or_refused_by_name(field: str, value: Any) -> None:
    async with serving(ScriptedEngine(scripts=[("A", EOS)], template=TOOL_TEMPLATE)) as client:
        reply = await chat(client, **{field: value})
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"]
