"""Shortest path in an unweighted graph given as neighbour lists."""

from collections import deque
from random import Random

from thinkfold.pebble.problem import Problem
from thinkfold.pebble.tasks.integers import same_integer

NAME = "graph"
NODES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
INTRO = (
    "Roads join these towns:\n{}\nHow many roads does the shortest way from {} to {} use? Answer -1 if there is no way."
)


def distances(neighbours: dict[str, str], start: str) -> dict[str, int]:
    """Length of a shortest path to every town that can be reached."""
    seen = {start: 0}
    queue = deque([start])
    while queue:
        town = queue.popleft()
        for other in neighbours[town]:
            if other not in seen:
                seen[other] = seen[town] + 1
                queue.append(other)
    return seen


def _ring_roads(rng: Random, towns: list[str], extra: float) -> set[tuple[str, str]]:
    """Roads mostly between towns near each other on a line, so that distances vary."""
    roads: set[tuple[str, str]] = set()
    for i in range(1, len(towns)):
        if rng.random() < 0.96:
            roads.add((towns[max(0, i - rng.randint(1, 4))], towns[i]))
    for _ in range(int(extra * len(towns))):
        i = rng.randrange(len(towns))
        j = min(len(towns) - 1, i + rng.randint(1, 5))
        if i != j:
            roads.add((towns[i], towns[j]))
    return roads


def generate(rng: Random, towns: tuple[int, int] = (10, 16), extra: float = 0.4) -> Problem:
    """A graph of `towns` towns with about `1 + extra` roads a town."""
    names = rng.sample(NODES, rng.randint(*towns))
    lists: dict[str, list[str]] = {name: [] for name in names}
    for a, b in sorted(_ring_roads(rng, list(names), extra)):
        lists[a].append(b)
        lists[b].append(a)
    rng.shuffle(names)
    neighbours = {name: "".join(sorted(lists[name], key=lambda _: rng.random())) for name in names}
    start, *others = rng.sample(names, 1 + min(4, len(names) - 1))
    far = distances(neighbours, start)
    goal = max(others, key=lambda town: far.get(town, 0)) if rng.random() < 0.9 else others[0]
    listing = "\n".join(f"{name}: {' '.join(near) or '-'}" for name, near in neighbours.items())
    data = {"neighbours": neighbours, "start": start, "goal": goal}
    return Problem(NAME, INTRO.format(listing, start, goal), str(far.get(goal, -1)), data)


def check(problem: Problem, answer: str) -> float:
    """1.0 for the exact length."""
    return same_integer(answer, problem.answer)
