"""Two arms on the same questions: what differs, and how sure that is. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from thinkfold.cli.evaluation import Result
from thinkfold.errors import ParameterError

_Z = 1.959964  # two-sided 95 %
_HALVINGS = 60


def compare(reference: Sequence[Result], other: Sequence[Result]) -> dict[str, float]:
    """What the second arm changes, in points of accuracy; both hold one sample of the same questions in order.

    `b` questions only the reference has right, `c` only the other arm. `kv_peak_ratio` is the mean
    over questions of peak entries, prompt and answer included, in the other arm and the reference;
    `thinking_tokens_ratio` the ratio of all thinking tokens.
    """
    pairs = list(zip(reference, other, strict=True))
    if any(r.index != o.index for r, o in pairs):
        raise ParameterError("compare", "the arms must answer the same questions in the same order")
    right = [(r.accuracy >= 1.0, o.accuracy >= 1.0) for r, o in pairs]
    b, c, n = right.count((True, False)), right.count((False, True)), len(pairs)
    low, high = tango(b, c, n)
    peaks = [o.kv_peak_entries / r.kv_peak_entries for r, o in pairs if r.kv_peak_entries]
    thinking = [sum(s.thinking_tokens for result in arm for s in result.samples) for arm in (reference, other)]
    return {
        "accuracy_ref": fmean(r for r, _ in right),
        "diff_points": 100.0 * (c - b) / n,
        "diff_ci95_low": 100.0 * low,
        "diff_ci95_high": 100.0 * high,
        "b": b,
        "c": c,
        "kv_peak_ratio": fmean(peaks) if peaks else 1.0,
        "thinking_tokens_ratio": thinking[1] / thinking[0] if thinking[0] else 1.0,
    }


def paired_metrics(right: Sequence[tuple[bool, bool]]) -> dict[str, float]:
    """Accuracy of both arms and their difference in points; pairs are (reference, arm)."""
    n = len(right)
    b, c = right.count((True, False)), right.count((False, True))
    low, high = tango(b, c, n)
    return {
        "n": n,
        "accuracy": fmean(arm for _, arm in right),
        "accuracy_ref": fmean(ref for ref, _ in right),
        "diff_points": 100.0 * (c - b) / n,
        "diff_ci95_low": 100.0 * low,
        "diff_ci95_high": 100.0 * high,
        "b": b,
        "c": c,
    }


def tango(b: int, c: int, n: int) -> tuple[float, float]:
    """95 % score interval of the difference (c - b) / n of two paired shares (Tango, Stat. Med. 17, 1998).

    `b` and `c` are the discordant pairs of `n`; `(-1, 1)` for n = 0.
    """
    if n == 0:
        return -1.0, 1.0
    found = (c - b) / n
    return _root(b, c, n, -1.0, found, _Z), _root(b, c, n, found, 1.0, -_Z)


def _root(b: int, c: int, n: int, low: float, high: float, wanted: float) -> float:
    """Where the statistic, which falls with the difference, equals `wanted` between `low` and `high`."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _score(b, c, n, middle) > wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _score(b: int, c: int, n: int, difference: float) -> float:
    """Tango's statistic: standard errors between what was found and `difference`."""
    p = -b - c + (2 * n - c + b) * difference
    q = -b * difference * (1 - difference)
    only_reference = (sqrt(max(0.0, p * p - 8 * n * q)) - p) / (4 * n)
    variance = n * (2 * only_reference + difference * (1 - difference))
    distance = c - b - n * difference
    if variance <= 0.0:
        return 0.0 if distance == 0 else float("inf") if distance > 0 else float("-inf")
    return distance / sqrt(variance)
