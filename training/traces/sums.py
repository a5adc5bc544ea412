"""Traces for sums of products: a segment a product, then additions that recall the conclusions."""

from random import Random

from thinkfold.pebble.problem import Problem
from training.traces.digits import addition, low_first, residue, slipped
from training.traces.trace import Trace, unlearned

SLIP_RATE = 0.04
PER_SEGMENT = 2  # additions


def _row(a: str, digit: int, rest: str, slip: Random | None) -> tuple[str, str]:
    """Steps of one row: digit * a + rest, digits lowest first; returns text and the new digits."""
    carry, out, parts = 0, "", []
    at = slip.randrange(len(a)) if slip else -1
    for i, char in enumerate(a):
        product = int(char) * digit
        step = product + int(rest[i]) + carry
        text = f"{step:02d}"
        if slip and i == at:
            step = slipped(slip, step, 100)
            text = unlearned(f"{step:02d}")
        parts.append(f"{char}*{digit}={product:02d}+{rest[i]}+{carry}={text};")
        carry = step // 10
        out += str(step % 10)
    return "".join(parts), out + str(carry)


def product(a: int, b: int, slip: Random | None = None) -> tuple[list[str], int]:
    """Lines that multiply a by b row by row, and the value reached."""
    reverse, done, rest = low_first(a, 1), "", "0" * len(str(a))
    rows = str(b)[::-1]
    at = slip.randrange(len(rows)) if slip else -1
    lines = []
    for j, digit in enumerate(rows):
        steps, out = _row(reverse, int(digit), rest, slip if j == at else None)
        done += out[0]
        rest = out[1:]
        last = j == len(rows) - 1
        lines.append(f"{reverse},{digit}:{steps}={done}{'' if last else ','}{rest}")
    value = int((done + rest)[::-1])
    lines.append(f"Read back: {value}.")
    return lines, value


def nines(a: int, b: int, value: int) -> tuple[str, bool]:
    """The check of a product by casting out nines, and whether it holds."""
    (text_a, rest_a), (text_b, rest_b), (text_v, rest_v) = residue(a), residue(b), residue(value)
    expected = rest_a * rest_b
    verdict = "ok" if expected % 9 == rest_v else "wrong"
    return (
        f"Check {text_a} {text_b} {rest_a}*{rest_b}={expected:02d}:{expected % 9} {text_v} {verdict}.",
        verdict == "ok",
    )


def _product_segments(index: int, a: int, b: int, rng: Random) -> list[str]:
    x, y = (a, b) if rng.random() < 0.5 else (b, a)
    segments = []
    while True:
        slip = rng if not segments and rng.random() < SLIP_RATE else None
        lines, value = product(x, y, slip)
        check, ok = nines(x, y, value)
        opening = f"Term {index}: {a}*{b}{', swapped' if x != a else ''}."
        if segments:
            opening = f"Wait, {x}*{y} again."
        if ok and value != a * b:
            continue  # a slip that the check cannot see teaches nothing
        if ok:
            closing = f"So term {index} is {value}."
            return [*segments, "\n".join((opening, *lines, check, closing))]
        segments.append("\n".join((opening, *lines, check, f"So term {index} has a mistake and must be done again.")))


def _passage(values: list[int], order: list[int], word: str, slip: Random | None) -> tuple[list[str], int]:
    """Add the terms in an order, a few a segment; returns segments and the total reached."""
    total, segments = values[order[0]], []
    at = slip.randrange(1, len(order)) if slip else -1
    lines = [f"{word} Start with term {order[0] + 1}: {total}."]
    for k, index in enumerate(order[1:], 1):
        steps, reached = addition(total, values[index], slip if k == at else None)
        lines += [f"Add term {index + 1}: {values[index]}.", steps]
        total = reached
        if k % PER_SEGMENT == 0 or k == len(order) - 1:
            lines.append(f"So the total up to term {index + 1} is {total}.")
            segments.append("\n".join(lines))
            lines = [f"Go on from {total}."]
        else:
            lines.append(f"Total {total}.")
    return segments, total


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a sum of products."""
    pairs = problem.data["pairs"]
    values = [a * b for a, b in pairs]
    order = list(range(len(pairs)))
    kind = rng.random()
    if kind < 0.25:
        order.reverse()
    elif kind < 0.5:
        rng.shuffle(order)
    plan = ", ".join(str(i + 1) for i in order)
    segments = [f"There are {len(pairs)} products. I take the terms in the order {plan}."]
    for i in order:
        segments += _product_segments(i + 1, *pairs[i], rng)
    along = list(range(len(pairs)))
    if rng.random() < 0.3:
        along.reverse()
    if len(pairs) == 1:
        return Trace(segments, problem.answer, len(segments) - 1)
    slip = rng if rng.random() < SLIP_RATE else None
    first, total = _passage(values, along, "Now the sum.", slip)
    segments += first
    segments[-1] += f" That makes {total}."
    settled = len(segments) - 1
    if slip or rng.random() < 0.5:
        second, again = _passage(values, along[::-1], "Let me add once more the other way round.", None)
        segments += second
        if again == total:
            segments[-1] += f" The same, {total}."
        else:
            segments[-1] += f" Wait, before it was {total}."
            settled = len(segments)
            third, _ = _passage(values, along, "A third time decides.", None)
            segments += third
    return Trace(segments, problem.answer, settled)
