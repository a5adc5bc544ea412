"""Checks of single values; each error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from thinkfold.errors import ParameterError


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParameterError(name, f"must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise ParameterError(name, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}")


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and (not isinstance(value, str) or value not in allowed):
        raise ParameterError(name, f"must be one of {', '.join(allowed)}, got {value!r}")


def integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ParameterError(name, f"must be {bound}, got {value}")


def fields_of(field: str, given: Any, kind: type[Any]) -> dict[str, Any]:
    """What an object says of a dataclass's fields; null is not given."""
    if not isinstance(given, Mapping):
        raise ParameterError(field, f"must be an object, got {given!r:.60}")
    names = [entry.name for entry in fields(kind)]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise ParameterError(f"{field}.{unknown!s:.60}", f"there is no such field, there are {', '.join(names)}")
    return {name: value for name, value in given.items() if value is not None}
