"""What a verifier is asked and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thinkfold.errors import ParameterError

DEFAULT_SECONDS = 5.0
MAX_SECONDS = 600.0


class Judged(NamedTuple):
    """What a verifier reads: a finished answer, or thinking without one yet. Thinking is empty unless asked for."""

    answer: str
    thinking: str = ""


class Verdict(NamedTuple):
    """A score in [0, 1], or None and why there is none."""

    score: float | None
    error: str | None = None


Score = float | Sequence[float]  # a list of scores of steps counts by its last
Scorer = Callable[[str, Sequence[Judged]], Sequence[Score]]
"""Takes the question and a batch; returns one score in [0, 1] each. It is called in threads."""


def check_name(field: str, given: Any) -> None:
    """Raise ParameterError for what is no name: a request's address could make the server call any machine."""
    if not isinstance(given, str) or "/" in given:
        raise ParameterError(field, f"must be the name of a verifier that the operator has set, got {given!r:.60}")
