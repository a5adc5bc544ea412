"""Arms of a comparison: ways to fold, and shares of the questions that one process asks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
    """Questions, by number, that one process asks in this order under one arm."""

    arm: Arm
    suite: str
    questions: list[int]
    config: EngineConfig
    budget: int


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


def ask(shard: Shard) -> list[Result]:
    """Start an engine, ask a shard's questions, stop the engine."""
    return asyncio.run(_ask(shard))


async def _ask(shard: Shard) -> list[Result]:
    wanted = [evaluation.suite_questions(shard.suite, 1, number)[0] for number in shard.questions]
    sampling, thinking = SamplingParams(temperature=0.0), ThinkingParams(thinking_token_budget=shard.budget)
    engine = await AsyncEngine.start(shard.config)
    try:
        found, _ = await evaluation.evaluate(
            engine, wanted, sampling, thinking, shard.arm.fold, in_flight=len(wanted), on_result=lambda _: None
        )
    finally:
        await engine.stop()
    return found
