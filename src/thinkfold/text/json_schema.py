"""JSON schemas that a grammar can hold. A keyword that it would ignore is refused by name.

The lists are those of xgrammar, each tried out: what stands here is enforced. Stricter than JSON
Schema in two ways: properties come in the schema's order, and where `additionalProperties` is
not given there are none. `oneOf` counts as `anyOf`, strings of bounded length hold no
escapes, and a pattern matches the whole string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinkfold.errors import ParameterError, UnsupportedError

MAX_DEPTH = 64
MAX_LENGTH = 1_000_000
ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
    }
)
_HOLDERS = frozenset({"$defs", "definitions"})
_GROUPS = _HOLDERS | {"properties", "patternProperties"}
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"additionalProperties", "unevaluatedProperties", "propertyNames", "items"})
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")  # beside them everything else is ignored
_ASSERTIONS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "pattern",
        "minLength",
        "maxLength",
        "format",
    }
)
FORMATS = frozenset(
    {
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "json-pointer",
        "relative-json-pointer",
    }
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SHAPES: tuple[tuple[tuple[type, ...], str, tuple[str, ...]], ...] = (
    ((int,), "an integer", _COUNTS),
    ((int, float), "a number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    ((str,), "a string", ("pattern", "format", "$ref")),
    ((str, list), "a string or a list of strings", ("type",)),
    ((list,), "a list", ("required", "enum", *sorted(_LISTS))),
    ((dict,), "an object", tuple(sorted(_GROUPS))),
)


def enforceable(schema: Any, field: str) -> Any:
    """`schema` as the grammar takes it. Raises UnsupportedError or ParameterError that names the place."""
    return _prepare(schema, field, MAX_DEPTH)


def _prepare(schema: Any, where: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ParameterError(where, f"must be a schema (an object), got {type(schema).__name__}")
    if depth == 0:
        raise ParameterError(where, f"is nested more than {MAX_DEPTH} deep")
    given = [key for key in schema if key not in ANNOTATIONS and key not in _HOLDERS]
    alone = [key for key in given if key in _ALONE]
    if alone and (len(given) > 1) and not (set(given) <= {"enum", "const", "type"}):
        other = next(key for key in given if key != alone[0])
        raise UnsupportedError(f"{where}.{other!s:.60}", f"cannot stand beside {alone[0]}")
    unknown = next((key for key in given if key not in _ASSERTIONS and key not in _ALONE), None)
    if unknown is not None:
        raise UnsupportedError(f"{where}.{unknown!s:.60}", "is not a keyword that a grammar can enforce")
    _check_values(schema, where)
    prepared = dict(schema)
    for key, value in schema.items():
        prepared[key] = _prepare_children(key, value, f"{where}.{key!s:.60}", depth - 1)
    if not {"minLength", "maxLength"}.isdisjoint(schema):
        # xgrammar would let raw control characters into such strings, which is not JSON.
        least, most = prepared.pop("minLength", 0), prepared.pop("maxLength", "")
        prepared["pattern"] = f'^[^\\x00-\\x1f"\\\\]{{{least},{most}}}$'
    return prepared


def _check_values(schema: Mapping[str, Any], where: str) -> None:
    for kinds, words, names in _SHAPES:
        wrong = next((n for n in names if n in schema and not _is(schema[n], kinds)), None)
        if wrong is not None:
            raise ParameterError(f"{where}.{wrong}", f"must be {words}")
    for name in ("type", "required"):
        if isinstance(schema.get(name), list) and not all(isinstance(word, str) for word in schema[name]):
            raise ParameterError(f"{where}.{name}", "must hold strings")
    if "allOf" in schema and len(schema["allOf"]) != 1:
        raise UnsupportedError(f"{where}.allOf", "may hold one schema only")
    if "format" in schema and schema["format"] not in FORMATS:
        raise UnsupportedError(f"{where}.format", f"must be one of {', '.join(sorted(FORMATS))}")
    if "multipleOf" in schema and schema.get("type") != "integer":
        raise UnsupportedError(f"{where}.multipleOf", "needs type integer")
    if "pattern" in schema and not {"minLength", "maxLength", "format"}.isdisjoint(schema):
        raise UnsupportedError(f"{where}.pattern", "cannot stand beside minLength, maxLength or format")
    for name in _COUNTS:
        if not 0 <= schema.get(name, 0) <= MAX_LENGTH:
            raise ParameterError(f"{where}.{name}", f"must be in [0, {MAX_LENGTH}]")
    if schema.get("minLength", 0) > schema.get("maxLength", MAX_LENGTH):
        raise ParameterError(f"{where}.minLength", "is greater than maxLength")
    reference = schema.get("$ref", "#")
    if not reference.startswith("#"):
        raise UnsupportedError(f"{where}.$ref", "must point into the schema (#/…)")


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _prepare_children(key: str, value: Any, where: str, depth: int) -> Any:
    if key in _GROUPS and isinstance(value, Mapping):
        return {name: _prepare(child, f"{where}.{name!s:.60}", depth) for name, child in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_prepare(child, f"{where}[{i}]", depth) for i, child in enumerate(value)]
    return _prepare(value, where, depth) if key in _SINGLE else value
