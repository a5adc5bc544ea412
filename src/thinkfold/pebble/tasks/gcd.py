"""reasoning-gym's `gcd`: the greatest common divisor of a few numbers."""

from functools import reduce
from math import gcd
from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.borrowed import official_score

NAME = "gcd"
QUESTION = "Find the Greatest Common Divisor (GCD) of these numbers: {}. Give only the GCD as your final answer."


def build(numbers: list[int]) -> Problem:
    """The problem for these numbers."""
    question = QUESTION.format(", ".join(map(str, numbers)))
    return Problem(NAME, question, str(reduce(gcd, numbers)), {"numbers": numbers})


def generate(rng: Random, numbers: tuple[int, int] = (2, 2), largest: int = 1000) -> Problem:
    """`numbers` numbers up to `largest`, half of the time with a planted common factor."""
    count = rng.randint(*numbers)
    factor = rng.randint(2, max(2, largest // 12)) if rng.random() < 0.5 else 1
    return build([factor * rng.randint(1, largest // factor) for _ in range(count)])


def check(problem: Problem, answer: str) -> float:
    """reasoning-gym's score."""
    return official_score(NAME, problem, answer)
