"""reasoning-gym's own scorers, imported only when a score is asked for (extra `eval`)."""

from functools import cache
from typing import Any

from thinkfold.pebble.problem import Problem


@cache
def _dataset(name: str) -> Any:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    return reasoning_gym.create_dataset(name, size=1, seed=0)


def official_score(name: str, problem: Problem, answer: str) -> float:
    """reasoning-gym's `score_answer` of dataset `name`; only a full score counts."""
    entry = {"question": problem.question, "answer": problem.answer, "metadata": dict(problem.data)}
    return float(_dataset(name).score_answer(answer, entry) >= 1.0)
