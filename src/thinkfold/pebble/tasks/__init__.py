"""The task families: each module has NAME, generate(rng, ...) and check(problem, boxed answer)."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from thinkfold.pebble.problem import Problem, extract_boxed
from thinkfold.pebble.tasks import (
    boxes,
    chain_sum,
    countdown,
    gcd,
    graph,
    leg_counting,
    mental,
    number_sorting,
    sums,
)
from thinkfold.pebble.tasks.integers import same_integer

__all__ = ["FAMILIES", "Family", "generate", "own_score", "score"]


class Family(NamedTuple):
    """What a task module offers."""

    generate: Callable[..., Problem]
    check: Callable[[Problem, str], float]


FAMILIES = {
    module.NAME: Family(module.generate, module.check)
    for module in (sums, countdown, boxes, graph, chain_sum, gcd, number_sorting, leg_counting, mental)
}
BORROWED = ("chain_sum", "gcd", "number_sorting", "leg_counting")


def generate(task: str, rng: Random, **size: object) -> Problem:
    """One problem of a family; `size` are that family's own keywords."""
    return FAMILIES[task].generate(rng, **size)


def _boxed(answer_text: str) -> str | None:
    return extract_boxed(answer_text.rpartition("</think>")[2])


def score(problem: Problem, answer_text: str) -> float:
    """1.0 when the last boxed answer after the thinking is right; reasoning-gym judges its own tasks."""
    boxed = _boxed(answer_text)
    return 0.0 if boxed is None else FAMILIES[problem.task].check(problem, boxed)


def own_score(problem: Problem, answer_text: str) -> float:
    """As `score`, without reasoning-gym: for machines where it is not installed."""
    boxed = _boxed(answer_text)
    if boxed is None:
        return 0.0
    if problem.task not in BORROWED:
        return FAMILIES[problem.task].check(problem, boxed)
    if problem.task == "number_sorting":
        return float(boxed.replace(" ", "") == problem.answer.replace(" ", ""))
    return same_integer(boxed, problem.answer)
