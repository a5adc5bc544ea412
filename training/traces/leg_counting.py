"""Traces for leg counting: one animal a line, a running total."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.leg_counting import LEGS, plural
from training.traces.trace import Trace


def _passage(animals: list[tuple[str, int]], opening: str) -> list[str]:
    total, segments, lines = 0, [], [opening]
    for k, (animal, count) in enumerate(animals, 1):
        legs = LEGS[animal]
        before, total = total, total + legs * count
        here = legs * count
        lines.append(f"{plural(animal, count)}: {legs} legs each, {count}*{legs}={here}, {before}+{here}={total}.")
        if k % 5 == 0 or k == len(animals):
            lines.append(f"So up to {animal} there are {total} legs.")
            segments.append("\n".join(lines))
            lines = ["Go on."]
    return segments


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a leg count."""
    animals = list(problem.data["animals"].items())
    segments = _passage(animals, "One animal after the other.")
    settled = len(segments) - 1
    if rng.random() < 0.5:
        segments += _passage(animals[::-1], "Let me count again from the end.")
    return Trace(segments, problem.answer, settled)
