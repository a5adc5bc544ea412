"""Checks of single values; each error names the field."""

from __future__ import annotations

import math
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
