"""reasoning-gym's `leg_counting`: how many legs a list of animals has."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.borrowed import official_score

NAME = "leg_counting"
QUESTION = """Your task is to count how many legs there are in total when given a list of animals.

Now, how many legs are there in total if you have {}?
"""
_BY_LEGS = {
    0: "snake, sea slug, jellyfish, flatworm, leech",
    2: "chicken, bird, human, duck",
    4: "dog, cat, cow, horse, lion, elephant, giraffe, tiger, deer, sheep",
    5: "starfish",
    6: "insect, ant, butterfly, beetle, bee, wasp, grasshopper, cricket, cockroach, praying mantis, firefly",
    8: "spider, scorpion",
    10: "crab, lobster, shrimp",
    14: "woodlouse",
}
LEGS = {animal: legs for legs, animals in _BY_LEGS.items() for animal in animals.split(", ")}


def plural(animal: str, count: int) -> str:
    """The count and the animal as reasoning-gym writes them."""
    return f"{count} {animal}{'s' if count > 1 else ''}"


def build(animals: dict[str, int]) -> Problem:
    """The problem for these animals and counts."""
    listing = ", ".join(plural(animal, count) for animal, count in animals.items())
    total = sum(LEGS[animal] * count for animal, count in animals.items())
    return Problem(NAME, QUESTION.format(listing), str(total), {"animals": animals})


def generate(rng: Random, animals: tuple[int, int] = (3, 10), largest: int = 15) -> Problem:
    """`animals` kinds of animals, up to `largest` of each."""
    kinds = rng.sample(list(LEGS), rng.randint(*animals))
    return build({animal: rng.randint(1, largest) for animal in kinds})


def check(problem: Problem, answer: str) -> float:
    """reasoning-gym's score."""
    return official_score(NAME, problem, answer)
