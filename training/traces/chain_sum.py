"""Traces for chain_sum: add what is added, add what is taken away, then one subtraction."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces.digits import addition, subtraction
from training.traces.trace import Trace

PER_SEGMENT = 2  # additions


def _group(numbers: list[int], word: str) -> tuple[list[str], int]:
    total = numbers[0]
    lines = [f"{word}: start with {total}."]
    segments = []
    for k, number in enumerate(numbers[1:], 1):
        steps, total = addition(total, number)
        lines += [f"Add {number}.", steps]
        if k % PER_SEGMENT == 0 and k < len(numbers) - 1:
            lines.append(f"So far {word} is {total}.")
            segments.append("\n".join(lines))
            lines = [f"Go on from {total}."]
        elif k < len(numbers) - 1:
            lines.append(f"Total {total}.")
    lines.append(f"So {word} is {total}.")
    segments.append("\n".join(lines))
    return segments, total


def _difference(plus: int, minus: int) -> tuple[str, int]:
    if plus >= minus:
        return (
            f"{plus} is not smaller than {minus}.\n{subtraction(plus, minus)}\nSo the result is {plus - minus}.",
            plus - minus,
        )
    steps = subtraction(minus, plus)
    return f"{plus} is smaller than {minus}.\n{steps}\nSo the result is {plus - minus}.", plus - minus


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a chain of additions and subtractions."""
    terms = problem.data["terms"]
    plus = [term for term in terms if term >= 0]
    minus = [-term for term in terms if term < 0]
    if rng.random() < 0.3:
        rng.shuffle(plus)
        rng.shuffle(minus)
    shown = f"Added are {', '.join(map(str, plus))}"
    segments = [f"{shown}; taken away are {', '.join(map(str, minus)) or 'none'}."]
    part, gained = _group(plus, "plus")
    segments += part
    if minus:
        part, lost = _group(minus, "minus")
        segments += part
        closing, _ = _difference(gained, lost)
        segments.append(closing)
    settled = len(segments) - 1
    if rng.random() < 0.35:
        part, again = _group(plus[::-1], "plus")
        segments.append("Let me check the first part.\n" + part[0])
        segments += part[1:]
        segments[-1] += f" The same, {again}."
    return Trace(segments, problem.answer, settled)
