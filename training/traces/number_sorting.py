"""Traces for number sorting: insertion, the whole list written after each step."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces.trace import Trace


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a sorted list."""
    numbers, direction = problem.data["numbers"], problem.data["direction"]
    order = list(numbers)
    if rng.random() < 0.3:
        order.reverse()
    segments = [f"Sort {len(order)} numbers, {direction}: {'; '.join(order)}."]
    done: list[str] = []
    lines: list[str] = []
    for k, number in enumerate(order, 1):
        done = sorted([*done, number], key=float, reverse=direction == "descending")
        lines.append(f"{k} insert {number}: {'; '.join(done)}.")
        if k % 3 == 0 or k == len(order):
            lines.append(f"So the order of {k} is {'; '.join(done)}.")
            segments.append("\n".join(lines))
            lines = []
    settled = len(segments) - 1
    if rng.random() < 0.3:
        segments.append(f"Let me count: {len(order)} numbers went in, {len(done)} are in the list. So it is complete.")
    return Trace(segments, problem.answer, settled)
