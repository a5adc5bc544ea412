"""Final answers as strings: where they stand in a text, when two are the same, which has most votes."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from thinkfold.control.equality import Equality
from thinkfold.pebble import extract_boxed


def final_answer(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, else the last line with text on it, else None."""
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are the same by the voting relation, without its helpers: `1,200` is `1200.0`."""
    return Equality().same(a, b)


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first answer of the largest class of equal answers; None if there are no answers.

    Between equal classes the one that was seen first wins.
    """
    found = Equality().partition(answers).classes
    return max(found, key=lambda one: len(one.members)).members[0] if found else None


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share (Wilson, 1927); `(0, 1)` for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = share + z * z / (2 * n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
