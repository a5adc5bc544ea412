"""Final answers as strings: where they stand in a text, when two are the same, which has most votes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import sqrt

from thinkfold.pebble import extract_boxed


def final_answer(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, else the last line with text on it, else None."""
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def canonical(answer: str) -> str:
    """One spelling for equal answers: blanks, `$`, a final full stop and grouping commas go; numbers are exact.

    `1,200`, `1200.0` and `$1200$` become `1200`; `.5` and `2/4` become `1/2`.
    """
    text = "".join(answer.replace("$", "").replace("\\,", "").split()).rstrip(".")
    try:
        return str(Fraction(text.replace(",", "") if _groups_thousands(text) else text))
    except (ValueError, ZeroDivisionError):
        return text


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first answer of the largest class of equal canonical answers; None if there are no answers.

    Between equal classes the one that was seen first wins.
    """
    names = [None if answer is None else canonical(answer) for answer in answers]
    votes = Counter(name for name in names if name is not None)
    if not votes:
        return None
    return names.index(max(votes, key=votes.__getitem__))


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share (Wilson, 1927); `(0, 1)` for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = share + z * z / (2 * n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _groups_thousands(text: str) -> bool:
    first, *groups = text.lstrip("+-").partition(".")[0].split(",")
    return bool(groups) and 1 <= len(first) <= 3 and all(len(g) == 3 and g.isdigit() for g in [*groups])
