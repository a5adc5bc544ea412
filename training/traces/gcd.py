"""Traces for gcd: Euclid, each remainder by subtracting multiples from the highest place down."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces.trace import Trace


def remainder(a: int, b: int) -> tuple[str, int]:
    """Steps that reduce a modulo b."""
    parts = []
    for power in (100, 10, 1):
        times = a // (b * power)
        if times:
            taken = b * times * power
            parts.append(f"{b}*{times * power}={taken},{a}-{taken}={a - taken};")
            a -= taken
    return "".join(parts), a


def _euclid(a: int, b: int) -> tuple[str, int]:
    a, b = max(a, b), min(a, b)
    lines = [f"Now {a} and {b}."]
    while True:
        steps, rest = remainder(a, b)
        lines.append(f"{a},{b}:{steps} rest {rest}")
        if rest == 0:
            lines.append(f"So the greatest common divisor so far is {b}.")
            return "\n".join(lines), b
        a, b = b, rest


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a greatest common divisor."""
    numbers = list(problem.data["numbers"])
    if rng.random() < 0.3:
        rng.shuffle(numbers)
    result, segments = numbers[0], [f"The numbers are {', '.join(map(str, numbers))}."]
    for number in numbers[1:]:
        text, result = _euclid(result, number)
        segments.append(text)
    settled = len(segments) - 1
    if rng.random() < 0.4:
        checks = []
        for number in numbers:
            steps, rest = remainder(number, result)
            checks.append(f"{number},{result}:{steps} rest {rest}")
        segments.append("Let me check that it divides each.\n" + "\n".join(checks) + f"\nSo {result} divides all.")
    return Trace(segments, problem.answer, settled)
