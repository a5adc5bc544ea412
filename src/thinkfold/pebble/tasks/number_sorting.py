"""reasoning-gym's `number_sorting`: a short list of decimals in either direction."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.borrowed import official_score

NAME = "number_sorting"
QUESTION = """Sort these numbers in {} order: {}
Please follow the instruction below:
## 1. Let all your answers be a list of numbers. Instead of reporting your answer as -69, -13, 1, 7, 11, 43, 59, 61, \
use ['-69', '-13', '1', '7', '11', '43', '59', '61'] instead
## 2. Convert all numbers in the square brackets as strings. For example, \
['-69', '-13', '1', '7', '11', '43', '59', '61']
"""


def build(numbers: list[str], direction: str) -> Problem:
    """The problem for these decimals; `direction` is ascending or descending."""
    ordered = sorted(numbers, key=float, reverse=direction == "descending")
    data = {"numbers": numbers, "direction": direction}
    return Problem(NAME, QUESTION.format(direction, ", ".join(numbers)), str(ordered), data)


def generate(rng: Random, numbers: tuple[int, int] = (3, 10), largest: float = 100.0) -> Problem:
    """`numbers` decimals between -largest and largest with 0 to 2 decimals."""
    count = rng.randint(*numbers)
    drawn = [str(round(rng.uniform(-largest, largest), rng.randint(1, 2))) for _ in range(count)]
    whole = [str(float(round(float(x)))) if rng.random() < 0.33 else x for x in drawn]
    return build(whole, rng.choice(("ascending", "descending")))


def check(problem: Problem, answer: str) -> float:
    """reasoning-gym's score."""
    return official_score(NAME, problem, answer)
