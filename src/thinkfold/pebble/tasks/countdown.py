"""Countdown: combine all numbers, each once, to reach a target; a search with dead branches."""

import ast
from collections.abc import Iterator
from fractions import Fraction
from random import Random

from thinkfold.pebble.problem import Problem

NAME = "countdown"
Numbers = tuple[int, ...]
Step = tuple[int, str, int, int, Numbers]  # larger, operator, smaller, value, numbers left
MOST = 99  # reference searches prune larger intermediate values
TEMPLATES = (
    "Use the numbers {} exactly once each, with + - * / and brackets, to make {}.",
    "Make {1} from the numbers {0}. Use every number exactly once, with + - * / and brackets.",
)


def results(x: int, y: int) -> Iterator[tuple[str, int]]:
    """Operators and values that a pair allows: whole, positive, at most 99 (x >= y)."""
    if x + y <= MOST:
        yield "+", x + y
    if x > y:
        yield "-", x - y
    if y > 1:
        if x * y <= MOST:
            yield "*", x * y
        if x % y == 0:
            yield "/", x // y


def branches(numbers: Numbers) -> list[Step]:
    """All first steps from numbers sorted downwards, in their fixed order."""
    found = []
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            rest = numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
            for operator, value in results(numbers[i], numbers[j]):
                left = tuple(sorted((*rest, value), reverse=True))
                found.append((numbers[i], operator, numbers[j], value, left))
    return found


def _pair_reaches(x: int, y: int, target: int) -> bool:
    if x < y:
        x, y = y, x
    return target in (x + y, x - y) or (y > 1 and (x * y == target or y * target == x))


def _three_reach(numbers: Numbers, target: int) -> bool:
    """Whether the pruned search reaches the target from three numbers sorted downwards."""
    a, b, c = numbers
    for x, y, z in ((a, b, c), (a, c, b), (b, c, a)):
        for _, value in results(x, y):
            if _pair_reaches(value, z, target):
                return True
    return False


def _late(numbers: list[int], target: int) -> bool:
    """Whether at least eight branches fail before one succeeds, from either end of the list."""
    steps = branches(tuple(sorted(numbers, reverse=True)))
    ends = (steps[:8], steps[-8:])
    return len(steps) > 16 and not any(_three_reach(step[4], target) for end in ends for step in end)


def _random_value(rng: Random, numbers: list[int]) -> int:
    left = list(numbers)
    while len(left) > 1:
        rng.shuffle(left)
        x, y = left.pop(), left.pop()
        left.append(rng.choice(list(results(max(x, y), min(x, y))) or [("", 0)])[1])
        if left[-1] == 0:
            return 0
    return left[0]


def generate(rng: Random, numbers: tuple[int, int] = (3, 4), largest: int = 15, late: bool = False) -> Problem:
    """`numbers` numbers up to `largest` and a target from 10 to 99; `late` asks for a long search."""
    count = rng.randint(*numbers)
    while True:
        given = [rng.randint(2, largest) for _ in range(count)]
        target = _random_value(rng, given)
        if target >= 10 and target not in given and (not late or _late(given, target)):
            break
    question = rng.choice(TEMPLATES).format(", ".join(map(str, given)), target)
    return Problem(NAME, question, str(target), {"numbers": given, "target": target})


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("only numbers, + - * / and brackets")
    left, right = _value(node.left, used), _value(node.right, used)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    raise ValueError("only + - * /")


def check(problem: Problem, answer: str) -> float:
    """1.0 for an expression that uses every number once and has the target's value."""
    expression = answer.split("=")[0].strip()
    if len(expression) > 200:
        return 0.0
    used: list[int] = []
    try:
        value = _value(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    right = value == problem.data["target"] and sorted(used) == sorted(problem.data["numbers"])
    return float(right)
