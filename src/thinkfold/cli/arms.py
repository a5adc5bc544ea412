"""Arms of a comparison: ways to fold, and shares of the questions that one process asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinkfold.cli import evaluation
from thinkfold.cli.evaluation import Result
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import ParameterError
from thinkfold.fold import selectors
from thinkfold.types import FoldMode, FoldParams, SamplingParams, ThinkingParams


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to fold, by the name that its row has."""

    name: str
    fold: FoldParams


@dataclass(frozen=True, slots=True)
class Shard:
    """What one process asks its engine: of each arm, the numbers of questions in their order."""

    suite: str
    config: EngineConfig
    questions: list[tuple[Arm, list[int]]]
    budget: int  # thinking tokens of an answer, -1 for no limit


def arms(words: Sequence[str]) -> list[Arm]:
    """`policy[/selector[/entries]]` as arms; a word that comes again is numbered. Raises ParameterError."""
    found: list[Arm] = []
    for word in words:
        policy, _, rest = word.partition("/")
        selector, _, entries = rest.partition("/")
        if policy not in list(FoldMode) or (selector and selector not in selectors.names()):
            raise ParameterError("arms", f"must be policy[/selector[/entries]], got {word!r}")
        if entries and not entries.isdecimal():
            raise ParameterError("arms", f"entries must be a number, got {word!r}")
        again = sum(arm.name.partition("#")[0] == word for arm in found)
        fold = FoldParams(policy=policy, selector=selector or None, entries=int(entries) if entries else None)
        found.append(Arm(f"{word}#{again + 1}" if again else word, fold))
    return found


def ask(shard: Shard, tell: Callable[[tuple[str, list[Result], float]], None]) -> None:
    """Ask one engine everything, arm after arm; each arm's name, results and seconds are told as soon as it is done."""
    asyncio.run(_ask(shard, tell))


async def _ask(shard: Shard, tell: Callable[[tuple[str, list[Result], float]], None]) -> None:
    sampling, thinking = SamplingParams(temperature=0.0), ThinkingParams(thinking_token_budget=shard.budget)
    engine = await AsyncEngine.start(shard.config)
    try:
        for arm, numbers in shard.questions:
            wanted = [evaluation.suite_questions(shard.suite, 1, number)[0] for number in numbers]
            found, seconds = await evaluation.evaluate(
                engine, wanted, sampling, thinking, arm.fold, in_flight=len(wanted), on_result=lambda _: None
            )
            tell((arm.name, found, seconds))
    finally:
        await engine.stop()
