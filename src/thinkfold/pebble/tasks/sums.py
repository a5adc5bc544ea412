"""Sums of products: every product is far from the sum that needs it exactly."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.integers import same_integer

NAME = "sums"
TEMPLATES = (
    "Compute {}.",
    "What is {}?",
    "Find the value of {}.",
)


def _number(rng: Random, digits: tuple[int, int]) -> int:
    length = rng.randint(*digits)
    return rng.randint(10 ** (length - 1), 10**length - 1)


def generate(rng: Random, terms: tuple[int, int] = (2, 4), digits: tuple[int, int] = (2, 3)) -> Problem:
    """A sum of `terms` products whose factors have `digits` digits."""
    pairs = [(_number(rng, digits), _number(rng, digits)) for _ in range(rng.randint(*terms))]
    expression = " + ".join(f"{a} * {b}" for a, b in pairs)
    total = sum(a * b for a, b in pairs)
    return Problem(NAME, rng.choice(TEMPLATES).format(expression), str(total), {"pairs": pairs})


def check(problem: Problem, answer: str) -> float:
    """1.0 for the exact sum."""
    return same_integer(answer, problem.answer)
