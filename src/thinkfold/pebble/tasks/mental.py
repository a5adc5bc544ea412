"""Mental arithmetic: short products added and subtracted, worked in big steps that can slip."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.integers import same_integer

NAME = "mental"
TEMPLATES = (
    "In your head: {}",
    "Work this out in your head: {}.",
    "Without writing out long multiplication, what is {}?",
)


def generate(
    rng: Random,
    terms: tuple[int, int] = (3, 6),
    first: tuple[int, int] = (11, 99),
    second: tuple[int, int] = (11, 99),
) -> Problem:
    """A chain of `terms` products; the factors lie in the ranges `first` and `second`."""
    count = rng.randint(*terms)
    products = [(rng.choice((1, 1, -1)), rng.randint(*first), rng.randint(*second)) for _ in range(count)]
    products[0] = (1, *products[0][1:])
    expression = "".join(f" {'+' if sign > 0 else '-'} {a} * {b}" for sign, a, b in products)[3:]
    total = sum(sign * a * b for sign, a, b in products)
    return Problem(NAME, rng.choice(TEMPLATES).format(expression), str(total), {"products": products})


def check(problem: Problem, answer: str) -> float:
    """1.0 for the exact value."""
    return same_integer(answer, problem.answer)
