"""Traces for countdown: a depth-first search in a fixed order, a segment a branch."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.countdown import Numbers, Step, branches, results
from training.traces.trace import Trace


def _joined(numbers: Numbers) -> str:
    return ",".join(map(str, numbers))


def _last_pair(pair: Numbers, target: int) -> tuple[str, str | None]:
    """The values of the last two numbers, up to the target if it is among them."""
    shown = []
    for operator, value in results(*pair):
        shown.append(f"{operator}{value}")
        if value == target:
            return " ".join(shown), operator
    return " ".join(shown), None


def _explore(numbers: Numbers, target: int) -> tuple[list[str], list[Step] | None]:
    """Lines that try every pair of three numbers (or the one pair of two), until the target appears."""
    if len(numbers) == 2:
        shown, operator = _last_pair(numbers, target)
        lines = [f"{_joined(numbers)}: {shown}"]
        return lines, [(*_pair_step(numbers, operator, target),)] if operator else None
    lines = []
    for step in branches(numbers):
        x, operator, y, value, left = step
        shown, last = _last_pair(left, target)
        lines.append(f"{x}{operator}{y}={value}, {_joined(left)}: {shown}")
        if last:
            return lines, [step, _pair_step(left, last, target)]
    return lines, None


def _pair_step(pair: Numbers, operator: str, target: int) -> Step:
    return (pair[0], operator, pair[1], target, (target,))


def expression(steps: list[Step]) -> tuple[list[str], str]:
    """Build the answer step by step: the lines that do it, and the final expression."""
    made: dict[int, list[str]] = {}
    lines, text = [], ""
    for x, operator, y, value, _ in steps:
        sides = []
        for number in (x, y):
            known = made.get(number)
            sides.append(f"({known.pop()})" if known else str(number))
        text = f"{sides[0]}{operator}{sides[1]}"
        made.setdefault(value, []).append(text)
        lines.append(f"{x}{operator}{y}={value} is {text}")
    return lines, text


def _finish(steps: list[Step], target: int) -> tuple[str, str]:
    lines, text = expression(steps)
    return "\n".join((*lines, f"So {text} makes {target}.")), text


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a countdown problem of three or four numbers."""
    target = problem.data["target"]
    numbers = tuple(sorted(problem.data["numbers"], reverse=True))
    segments = [f"The numbers are {_joined(numbers)} and the target is {target}."]
    path: list[Step] = []
    if len(numbers) <= 3:
        lines, found = _explore(numbers, target)
        path = found or []
        segments.append("\n".join((*lines, f"So {target} is reached.")))
    else:
        path = _search(numbers, target, rng, segments)
    closing, text = _finish(path, target)
    segments.append(closing)
    settled = len(segments) - 1
    if rng.random() < 0.4:
        lines = ", ".join(f"{x}{op}{y}={value}" for x, op, y, value, _ in path)
        segments.append(
            f"Let me check: {lines}. The numbers {_joined(numbers)} are each used once. So {target} is right."
        )
    return Trace(segments, text, settled)


def _search(numbers: Numbers, target: int, rng: Random, segments: list[str]) -> list[Step]:
    """Work through the branches in order or backwards; appends segments, returns the path."""
    plan = branches(numbers)
    backwards = rng.random() < 0.5
    listing = " ".join(f"{k}:{x}{op}{y}" for k, (x, op, y, _, _) in enumerate(plan, 1))
    way = "backwards" if backwards else "forwards"
    segments.append(f"Branches: {listing}. So there are {len(plan)} branches, taken {way}.")
    order = range(len(plan), 0, -1) if backwards else range(1, len(plan) + 1)
    for k in order:
        step = plan[k - 1]
        x, operator, y, value, left = step
        lines, found = _explore(left, target)
        opening = f"Branch {k}: {x}{operator}{y}={value}, left {_joined(left)}."
        if found:
            segments.append("\n".join((opening, *lines, f"So branch {k} reaches {target}.")))
            return [step, *found]
        closing = f"So branch {k} with {_joined(left)} does not reach {target}."
        if rng.random() < 0.03:
            again = branches(left)[-1]
            shown, _ = _last_pair(again[4], target)
            closing = (
                f"Wait, the last one again: {again[0]}{again[1]}{again[2]}={again[3]}, {_joined(again[4])}: {shown}. "
                + closing
            )
        segments.append("\n".join((opening, *lines, closing)))
    raise ValueError(f"{numbers} do not reach {target}")
