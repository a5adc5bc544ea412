"""Traces for mental arithmetic: big steps, several decompositions, doubt and a second way."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces.trace import Trace, unlearned

SLIP_RATE = 0.03
DOUBT_RATE = 0.12


def multiply(a: int, b: int, rng: Random, slip: bool = False) -> tuple[str, int]:
    """a * b by one decomposition chosen at random; the text and the value reached."""
    if rng.random() < 0.5:
        a, b = b, a
    ones = b % (100 if b > 100 and rng.random() < 0.5 else 10)
    tens = b - ones
    if ones == 0 or tens == 0:
        value = a * b
        return f"{a}*{b}={value}", value
    if 6 <= ones < 10 and rng.random() < 0.5:
        parts, sign, high, low = (tens + 10, 10 - ones), "-", a * (tens + 10), a * (10 - ones)
    else:
        parts, sign, high, low = (tens, ones), "+", a * tens, a * ones
    value = high - low if sign == "-" else high + low
    shown = str(value)
    if slip:
        value = max(1, value + rng.choice((-100, -20, -10, -1, 1, 10, 20, 100)))
        shown = unlearned(str(value))
    return f"{a}*{b}={a}*{parts[0]}{sign}{a}*{parts[1]}={high}{sign}{low}={shown}", value


def _term(index: int, sign: int, a: int, b: int, rng: Random) -> str:
    """One term, sometimes doubted and done a second way; a slip is always caught."""
    slip = rng.random() < SLIP_RATE
    text, value = multiply(a, b, rng, slip)
    lines = f"Term {index}: {text}."
    if slip or rng.random() < DOUBT_RATE:
        again, second = multiply(a, b, rng)
        lines += f" Wait, once more: {again}."
        if second == value:
            return f"{lines} The same."
        third, _ = multiply(a, b, rng)
        lines += f" They differ: {third}. So {a * b}."
    return lines


def _readd(values: list[tuple[int, int]], order: list[int]) -> str:
    total, parts = 0, []
    for index in order:
        sign, value = values[index]
        before, total = total, total + sign * value
        parts.append(f"{before}{'+' if sign > 0 else '-'}{value}={total}")
    return f"Let me add again: {', '.join(parts)}. So the value is {total}."


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a chain of products in big steps."""
    products = problem.data["products"]
    order = list(range(len(products)))
    if rng.random() < 0.4:
        order.sort(key=lambda i: -products[i][0])
    elif rng.random() < 0.5:
        rng.shuffle(order)
    segments = [f"I take the terms in the order {', '.join(str(i + 1) for i in order)}."]
    total, lines = 0, []
    for k, i in enumerate(order, 1):
        sign, a, b = products[i]
        before, total = total, total + sign * a * b
        lines.append(_term(i + 1, sign, a, b, rng))
        lines.append(f"{before}{'+' if sign > 0 else '-'}{a * b}={total}.")
        if k % 3 == 0 or k == len(order):
            lines.append(f"So after term {i + 1} the value is {total}.")
            segments.append("\n".join(lines))
            lines = []
    settled = len(segments) - 1
    if rng.random() < 0.4:
        values = [(sign, a * b) for sign, a, b in products]
        segments.append(_readd(values, order[::-1]))
    return Trace(segments, problem.answer, settled)
