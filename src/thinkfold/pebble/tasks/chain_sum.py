"""reasoning-gym's `chain_sum`: a chain of additions and subtractions."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.borrowed import official_score

NAME = "chain_sum"
QUESTION = "State the final answer to the following arithmetic problem: {} ="
PLAIN = ("What is {}?", "Compute {}.", "{} =", "Calculate {}")


def build(terms: list[int], wording: str = QUESTION) -> Problem:
    """The problem for signed terms, the first one positive."""
    expression = str(terms[0]) + "".join(f" {'-' if term < 0 else '+'} {abs(term)}" for term in terms[1:])
    return Problem(NAME, wording.format(expression), str(sum(terms)), {"terms": terms})


def generate(
    rng: Random, terms: tuple[int, int] = (2, 6), digits: tuple[int, int] = (1, 4), plain: bool = False
) -> Problem:
    """`terms` numbers of one common length in `digits`, as reasoning-gym draws them; or in plain words."""
    length = rng.randint(*digits)
    low, high = (1 if length == 1 else 10 ** (length - 1)), 10**length - 1
    numbers = [rng.randint(low, high) for _ in range(rng.randint(*terms))]
    return build([numbers[0], *(rng.choice((n, -n)) for n in numbers[1:])], rng.choice(PLAIN) if plain else QUESTION)


def check(problem: Problem, answer: str) -> float:
    """reasoning-gym's score."""
    return official_score(NAME, problem, answer)
