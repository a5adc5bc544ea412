"""What is drawn in training: for each stage, weighted families and sizes (wider than the suites)."""

from random import Random
from typing import Any

# Share of tokens wanted, usual tokens of one sample, family, its size keywords.
Entry = tuple[float, int, str, dict[str, Any]]

SHORT: tuple[Entry, ...] = (
    (0.09, 700, "sums", {"terms": (1, 3), "digits": (1, 4)}),
    (0.14, 1700, "sums", {"terms": (2, 5), "digits": (2, 4)}),
    (0.12, 470, "countdown", {"numbers": (3, 4), "largest": 15}),
    (0.17, 900, "boxes", {"boxes": (2, 5), "operations": (3, 30)}),
    (0.12, 350, "graph", {"towns": (4, 30), "extra": 0.5}),
    (0.08, 700, "chain_sum", {"terms": (2, 8), "digits": (1, 8)}),
    (0.02, 500, "chain_sum", {"terms": (2, 5), "digits": (1, 5), "plain": True}),
    (0.07, 320, "gcd", {"numbers": (2, 4), "largest": 1000}),
    (0.05, 400, "number_sorting", {"numbers": (3, 10)}),
    (0.04, 340, "leg_counting", {"animals": (3, 10)}),
    (0.12, 400, "mental", {"terms": (1, 10)}),
)
MIDDLE: tuple[Entry, ...] = (
    (0.24, 3200, "sums", {"terms": (4, 9), "digits": (2, 4)}),
    (0.15, 2300, "countdown", {"numbers": (4, 4), "largest": 15, "late": True}),
    (0.22, 2750, "boxes", {"boxes": (3, 6), "operations": (20, 80)}),
    (0.14, 800, "graph", {"towns": (20, 52), "extra": 0.7}),
    (0.07, 2300, "chain_sum", {"terms": (6, 20), "digits": (2, 8)}),
    (0.11, 950, "mental", {"terms": (4, 20), "first": (11, 999)}),
    (0.07, 500, "mental", {"terms": (1, 10), "first": (101, 999), "second": (101, 999)}),
)
LONG: tuple[Entry, ...] = (
    (0.40, 7000, "sums", {"terms": (8, 16), "digits": (3, 4)}),
    (0.42, 6500, "boxes", {"boxes": (3, 7), "operations": (60, 170)}),
    (0.18, 2300, "countdown", {"numbers": (4, 4), "largest": 15, "late": True}),
)
LISTS = (SHORT, MIDDLE, LONG)
# Share of tokens from each list by stage; training/train.py says when a stage begins.
STAGES: tuple[tuple[float, float, float], ...] = ((1.0, 0.0, 0.0), (0.45, 0.55, 0.0), (0.14, 0.26, 0.6))


def _weights(entries: tuple[Entry, ...]) -> list[float]:
    return [share / tokens for share, tokens, _, _ in entries]


_WEIGHTS = [_weights(entries) for entries in LISTS]
_STAGE_WEIGHTS = [[share * sum(_WEIGHTS[k]) for k, share in enumerate(stage)] for stage in STAGES]


def draw(stage: int, rng: Random) -> tuple[str, dict[str, Any]]:
    """A family and its size keywords for one sample of a stage."""
    k = rng.choices((0, 1, 2), _STAGE_WEIGHTS[stage])[0]
    _, _, task, size = rng.choices(LISTS[k], _WEIGHTS[k])[0]
    return task, size
