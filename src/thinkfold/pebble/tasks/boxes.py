"""Long state tracking: marbles in lettered boxes under a numbered list of operations."""

from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.integers import same_integer

NAME = "boxes"
LETTERS = "ABCDEFGH"
MOST = 99  # a box never holds more, so that counts stay two digits
Operation = tuple[str, str, str, int]  # kind, first box, second box or "", amount

SENTENCES = {
    "put": "Put {n} marbles into box {a}.",
    "take": "Take {n} marbles out of box {a}.",
    "move": "Move {n} marbles from box {a} to box {b}.",
    "pour": "Move all marbles from box {a} to box {b}.",
    "swap": "Swap the contents of boxes {a} and {b}.",
    "double": "Double the marbles in box {a}.",
}
KINDS = ("put", "put", "take", "take", "move", "move", "move", "move", "swap", "swap", "pour", "double")
INTRO = "Some boxes hold marbles: {}. Then these things happen:\n{}\nHow many marbles are in box {} at the end?"


def apply(state: dict[str, int], operation: Operation) -> bool:
    """Change `state` by one operation; False, and no change, where a box would leave 0..99."""
    kind, a, b, n = operation
    first, second = state[a], state.get(b, 0)
    if kind == "put":
        first += n
    elif kind == "take":
        first -= n
    elif kind == "move":
        first, second = first - n, second + n
    elif kind == "pour":
        first, second = 0, first + second
    elif kind == "swap":
        first, second = second, first
    else:
        first *= 2
    if not (0 <= first <= MOST and 0 <= second <= MOST):
        return False
    state[a] = first
    if b:
        state[b] = second
    return True


def _operation(rng: Random, boxes: str) -> Operation:
    kind = rng.choice(KINDS)
    a, b = rng.sample(boxes, 2)
    amount = rng.randint(2, 9) if kind in ("put", "take", "move") else 0
    return kind, a, b if kind in ("move", "pour", "swap") else "", amount


def sentence(operation: Operation) -> str:
    """The operation as the question words it."""
    kind, a, b, n = operation
    return SENTENCES[kind].format(a=a, b=b, n=n)


def generate(rng: Random, boxes: tuple[int, int] = (3, 5), operations: tuple[int, int] = (8, 16)) -> Problem:
    """`operations` steps on `boxes` boxes; one box is asked for."""
    letters = LETTERS[: rng.randint(*boxes)]
    start = {letter: rng.randint(1, 30) for letter in letters}
    state = dict(start)
    wanted = rng.randint(*operations)
    steps: list[Operation] = []
    while len(steps) < wanted:
        operation = _operation(rng, letters)
        if apply(state, operation):
            steps.append(operation)
    asked = rng.choice(letters)
    opening = ", ".join(f"{letter} has {count}" for letter, count in start.items())
    listing = "\n".join(f"{i}. {sentence(step)}" for i, step in enumerate(steps, 1))
    data = {"start": start, "steps": steps, "asked": asked}
    return Problem(NAME, INTRO.format(opening, listing, asked), str(state[asked]), data)


def check(problem: Problem, answer: str) -> float:
    """1.0 for the exact count."""
    return same_integer(answer, problem.answer)
