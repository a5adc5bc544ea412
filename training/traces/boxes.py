"""Traces for boxes: every operation with the full state after it, a checksum each segment."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.boxes import Operation, apply
from training.traces.trace import Trace, unlearned

SLIP_RATE = 0.03


def _state(state: dict[str, int], total: int) -> str:
    return " ".join(f"{letter}{count:02d}" for letter, count in state.items()) + f" all {total:03d}"


def _work(step: Operation, state: dict[str, int]) -> str:
    kind, a, b, n = step
    x, y = state[a], state.get(b, 0)
    if kind == "put":
        return f"put {a}:{x:02d}+{n}={x + n:02d}"
    if kind == "take":
        return f"take {a}:{x:02d}-{n}={x - n:02d}"
    if kind == "move":
        return f"move {a}:{x:02d}-{n}={x - n:02d} {b}:{y:02d}+{n}={y + n:02d}"
    if kind == "pour":
        return f"all {a}:00 {b}:{y:02d}+{x:02d}={x + y:02d}"
    if kind == "swap":
        return f"swap {a}:{y:02d} {b}:{x:02d}"
    return f"double {a}:{x:02d}+{x:02d}={2 * x:02d}"


def _total_after(step: Operation, before: dict[str, int], total: int) -> int:
    kind, a, _, n = step
    return total + {"put": n, "take": -n, "double": before[a]}.get(kind, 0)


def _checksum(state: dict[str, int], total: int) -> str:
    counts = list(state.values())
    running, parts = counts[0], [f"{counts[0]:02d}"]
    for count in counts[1:]:
        running += count
        parts.append(f"+{count:02d}={running:03d}")
    return f"Check {''.join(parts)}, all {total:03d}, {'ok' if running == total else 'wrong'}."


def _block(
    number: int, steps: list[Operation], state: dict[str, int], total: int, slip: Random | None
) -> tuple[list[str], int]:
    """Lines for a few operations, none if a slip made one impossible; `state` is changed."""
    lines = []
    at = slip.randrange(len(steps)) if slip else -1
    for k, step in enumerate(steps):
        total = _total_after(step, state, total)
        work = _work(step, state)
        if not apply(state, step):
            return [], total
        shown = _state(state, total)
        if slip and k == at:
            letter = slip.choice(list(state))
            wrong = max(10, min(90, state[letter] + slip.choice((-10, -2, -1, 1, 2, 10))))
            if wrong == state[letter]:
                wrong += 1
            shown = shown.replace(f"{letter}{state[letter]:02d}", f"{letter}{unlearned(f'{wrong:02d}')}")
            state[letter] = wrong
        lines.append(f"{number + k} {work}; {shown}")
    return lines, total


def _segments(
    steps: list[Operation], first: int, state: dict[str, int], total: int, rng: Random
) -> tuple[list[str], int]:
    """Segments for one block of operations, with a planted and caught slip now and then."""
    segments = []
    last = first + len(steps) - 1
    opening = f"Operations {first} to {last}."
    if rng.random() < SLIP_RATE:
        wrong = dict(state)
        lines, slipped_total = _block(first, steps, wrong, total, rng)
        if lines and sum(wrong.values()) != slipped_total:
            check = _checksum(wrong, slipped_total)
            back = f"So there is a slip; after operation {first - 1} it was {_state(state, total)}."
            segments.append("\n".join((opening, *lines, check, back)))
            opening = f"Wait, operations {first} to {last} again."
    lines, total = _block(first, steps, state, total, None)
    closing = f"So after operation {last} the boxes hold {_state(state, total)}."
    segments.append("\n".join((opening, *lines, _checksum(state, total), closing)))
    return segments, total


def write(problem: Problem, rng: Random) -> Trace:
    """The trace of a boxes problem."""
    state, steps, asked = dict(problem.data["start"]), problem.data["steps"], problem.data["asked"]
    total = sum(state.values())
    segments = [f"At the start the boxes hold {_state(state, total)}. {len(steps)} operations follow."]
    size = rng.choice((5, 6))
    befores = []
    for first in range(0, len(steps), size):
        befores.append((first, dict(state), total))
        block, total = _segments(steps[first : first + size], first + 1, state, total, rng)
        segments += block
    segments[-1] += f" Box {asked} holds {state[asked]}."
    settled = len(segments) - 1
    if rng.random() < 0.5:
        first, before, total = befores[rng.randrange(max(0, len(befores) - 3), len(befores))]
        segments.append(f"Let me check from operation {first}: there the boxes hold {_state(before, total)}.")
        for start in range(first, len(steps), size):
            lines, total = _block(start + 1, steps[start : start + size], before, total, None)
            closing = f"So after operation {start + len(lines)} the boxes hold {_state(before, total)}."
            segments.append("\n".join((*lines, closing)))
        segments[-1] += f" Box {asked} holds {before[asked]} again."
    return Trace(segments, problem.answer, settled)
