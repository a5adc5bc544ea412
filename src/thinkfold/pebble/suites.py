"""The suites `medium`, `hard` and `long`: endless deterministic streams, disjoint from training.

Problem i of a suite depends on the suite's name and i alone, never on how many are taken.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from thinkfold.pebble.problem import Problem, is_evaluation
from thinkfold.pebble.tasks import generate

__all__ = ["SUITES", "problem_at", "problems"]

# Each suite cycles through its entries: (task, that family's size keywords).
Entry = tuple[str, dict[str, Any]]
SUITES: dict[str, tuple[Entry, ...]] = {
    "medium": (
        ("sums", {"terms": (2, 4), "digits": (2, 3)}),
        ("boxes", {"boxes": (3, 5), "operations": (14, 26)}),
        ("graph", {"towns": (24, 40)}),
        ("countdown", {"numbers": (3, 4), "largest": 12}),
        ("sums", {"terms": (2, 3), "digits": (3, 4)}),
        ("chain_sum", {"terms": (4, 6), "digits": (3, 4)}),
        ("boxes", {"boxes": (3, 4), "operations": (16, 30)}),
        ("gcd", {"numbers": (3, 4), "largest": 1000}),
        ("number_sorting", {"numbers": (6, 10)}),
        ("leg_counting", {"animals": (6, 10)}),
    ),
    "hard": (
        ("mental", {"terms": (2, 3), "first": (101, 999), "second": (101, 999)}),
        ("mental", {"terms": (8, 10), "first": (101, 999), "second": (101, 999)}),
        ("graph", {"towns": (48, 52), "extra": 1.2}),
        ("mental", {"terms": (4, 6), "first": (101, 999), "second": (101, 999)}),
        ("mental", {"terms": (3, 5), "first": (101, 999), "second": (101, 999)}),
    ),
    "long": (
        ("sums", {"terms": (9, 13), "digits": (3, 4)}),
        ("boxes", {"boxes": (4, 5), "operations": (90, 150)}),
        ("sums", {"terms": (8, 11), "digits": (4, 4)}),
        ("countdown", {"numbers": (4, 4), "largest": 15, "late": True}),
    ),
}


def problem_at(suite: str, index: int) -> Problem:
    """Problem number `index` of a suite."""
    entries = SUITES[suite]
    task, size = entries[index % len(entries)]
    rng = Random(f"{suite}:{index}")
    while True:
        problem = generate(task, rng, **size)
        if is_evaluation(problem.question):
            return problem


def problems(suite: str, n: int, offset: int = 0) -> Iterator[Problem]:
    """`n` problems of a suite from number `offset` on."""
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; there are {', '.join(SUITES)}")
    return (problem_at(suite, index) for index in range(offset, offset + n))
