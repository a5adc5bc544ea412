"""Which schemas a grammar can hold: each enforced keyword is tried on a good and a bad value."""

import json

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from thinkfold.errors import ParameterError
from thinkfold.text.json_schema import FORMATS, enforceable

A = {"type": "array", "items": {"type": "integer"}}
S = {"type": "string"}
OBJECT = {"type": "object"}
N = {"type": "integer"}
TREE = {"type": "object", "properties": {"k": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}}, "required": ["k"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**A, "minItems": 2, "maxItems": 3}, ["[1, 2]"], ["[1]", "[1, 2, 3, 4]"]),
        ({"type": "array", "prefixItems": [N, S], "items": False}, ['[1, "a"]'], ['["a", 1]', '[1, "a", 2]']),
        ({"anyOf": [N, S]}, ["1", '"a"'], ["true"]),
        ({"allOf": [N]}, ["1"], ['"a"']),
        ({**N, "minimum": 3, "exclusiveMaximum": 7}, ["3", "6"], ["2", "7"]),
        ({**N, "multipleOf": 3}, ["3"], ["4"]),
        ({"type": "number", "minimum": 0.5}, ["1.0"], ["0.4"]),
        ({**S, "pattern": "^a+$"}, ['"aa"'], ['"b"', '""']),
        ({**S, "minLength": 2, "maxLength": 3}, ['"aa"', '"é!x"'], ['"a"', '"aaaa"', '"\x08\x08"', '"a\tb"', '"a"b"']),
        ({**OBJECT, "properties": {"a": N}, "required": ["a"]}, ['{"a": 1}'], ["{}", '{"a": 1, "b": 2}']),
        ({**OBJECT, "additionalProperties": N, "minProperties": 1}, ['{"x": 1}'], ["{}", '{"x": "a"}']),
        ({**OBJECT, "patternProperties": {"^a.*$": N}, "additionalProperties": False}, ['{"ab": 1}'], ['{"b": 1}']),
        ({**OBJECT, "propertyNames": {"maxLength": 2}, "additionalProperties": N}, ['{"ab": 1}'], ['{"abc": 1}']),
        ({"type": ["integer", "null"]}, ["1", "null"], ['"a"']),
        ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["2"]),
        ({"$defs": {"t": TREE}, "$ref": "#/$defs/t"}, ['{"k": {"k": null}}'], ['{"k": 1}']),
        ({**S, "format": "date", "title": "t", "description": "d"}, ['"2020-01-31"'], ['"soon"']),
    ],
)
def test_what_is_taken_is_enforced(schema, good, bad):
    prepared = enforceable(schema, "f")
    grammar = Grammar.from_json_schema(json.dumps(prepared), any_whitespace=True)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_enforced(name):
    grammar = Grammar.from_json_schema(json.dumps(enforceable({**S, "format": name}, "f")))
    assert not accepts(grammar, '"\x01 b"') and not accepts(grammar, '" "')


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({**A, "uniqueItems": True}, "f.uniqueItems"),
        ({**A, "contains": {}}, "f.contains"),
        ({"properties": {"a": {"not": S}}}, "f.properties.a.not"),
        ({"if": N, "then": N}, "f.if"),
        ({"allOf": [N, N]}, "f.allOf"),
        ({"anyOf": [N, S], "minimum": 3}, "f.minimum"),
        ({"$ref": "#/$defs/a", "type": "object"}, "f.type"),
        ({"type": "number", "multipleOf": 0.5}, "f.multipleOf"),
        ({**S, "pattern": "a", "minLength": 2}, "f.pattern"),
        ({**S, "format": "zip"}, "f.format"),
        ({**S, "maxLenght": 2}, "f.maxLenght"),
        ({**S, "minLength": -1}, "f.minLength"),
        ({**S, "minLength": 5, "maxLength": 3}, "f.minLength"),
        ({"$ref": "http://x/y"}, "f.$ref"),
        ({"items": [N, S]}, "f.items"),
        ({"anyOf": [N, 3]}, "f.anyOf[1]"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "f.dependentRequired"),
    ],
)
def test_what_a_grammar_would_ignore_is_refused_by_name(schema, field):
    with pytest.raises(ParameterError) as caught:
        enforceable(schema, "f")
    assert caught.value.field == field


def test_deep_schemas_are_refused():
    schema = S
    for _ in range(100):
        schema = {**OBJECT, "properties": {"x": schema}}
    with pytest.raises(ParameterError, match="nested more than"):
        enforceable(schema, "f")
