"""Traces for graphs: breadth-first search; the one family whose segments part at a special token."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces.trace import SEGMENT_TOKEN, Trace

PER_SEGMENT = 5


def _queue(queue: list[str], far: dict[str, int]) -> str:
    return " ".join(f"{town}{far[town]}" for town in queue) or "empty"


def _path(came: dict[str, str], start: str, goal: str) -> str:
    steps, town = [], goal
    while town != start:
        steps.append(f"{town} from {came[town]}")
        town = came[town]
    return ", ".join(steps)


def _visit(
    town: str, neighbours: dict[str, str], far: dict[str, int], came: dict[str, str], queue: list[str], goal: str
) -> str:
    """Visit one town: mark each neighbour, stop early at the goal; returns the line."""
    words = []
    for other in neighbours[town]:
        if other in far:
            words.append(f"{other} old")
            continue
        far[other] = far[town] + 1
        came[other] = town
        if other == goal:
            words.append(f"{other} goal")
            break
        words.append(f"{other} new")
        queue.append(other)
    return f"{town}{far[town]}: {', '.join(words) or 'none'}. Queue {_queue(queue, far)}"


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a shortest path problem."""
    neighbours, start, goal = problem.data["neighbours"], problem.data["start"], problem.data["goal"]
    far, came, queue = {start: 0}, {}, [start]
    segments = [f"From {start} to {goal}. So the queue is {start}0 and seen is {start}."]
    lines: list[str] = []
    while queue and goal not in far:
        lines.append(_visit(queue.pop(0), neighbours, far, came, queue, goal))
        if len(lines) == PER_SEGMENT and queue and goal not in far:
            lines.append(f"So seen {' '.join(far)}; the queue is {_queue(queue, far)}.")
            segments.append("\n".join(lines))
            lines = []
    if goal in far:
        lines.append(f"So {goal} is reached with {far[goal]} roads.")
    else:
        lines.append(f"So the queue is empty and {goal} is never reached: -1.")
    segments.append("\n".join(lines))
    settled = len(segments) - 1
    if goal in far and rng.random() < 0.6:
        segments.append(f"Let me walk back: {_path(came, start, goal)}. So there are {far[goal]} roads.")
    return Trace(segments, problem.answer, settled, SEGMENT_TOKEN)
