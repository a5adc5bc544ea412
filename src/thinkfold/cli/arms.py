"""Arms of a comparison: ways to answer, and shares of the questions that one process asks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from thinkfold.cli import evaluation
from thinkfold.cli.evaluation import Result
from thinkfold.cli.processes import spread
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import ParameterError
from thinkfold.fold import selectors
from thinkfold.types import ControlParams, Decision, FoldMode, FoldParams, SamplingParams, ThinkingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer, by the name that its row has; `seed` is added to that of each question."""

    name: str
    fold: FoldParams
    control: ControlParams | None = None
    how: Decision | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """What one process asks its engine: of each arm, the numbers of questions in their order.

    A question is asked with `sampling`, and once where the arm decides over samples of its own.
    """

    suite: str
    config: EngineConfig
    questions: list[tuple[Arm, list[int]]]
    budget: int  # thinking tokens of an answer, -1 for no limit
    sampling: SamplingParams = GREEDY
    in_flight: int | None = None  # questions at a time; None: all


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


def measure(shards: Sequence[Shard], asked: Sequence[Arm], gpus: int = 0) -> Iterator[tuple[Arm, list[Result], float]]:
    """Each arm's results by question, and seconds of its slowest process, as soon as it is through."""
    by_name = {arm.name: arm for arm in asked}
    found: dict[str, list[tuple[list[Result], float]]] = {name: [] for name in by_name}
    for name, results, seconds in spread(ask, shards, gpus):
        found[name].append((results, seconds))
        print(f"{name}: {len(found[name])} of {len(shards)} processes", file=sys.stderr)
        if len(found[name]) == len(shards):
            together = chain.from_iterable(results for results, _ in found[name])
            slowest = max(seconds for _, seconds in found[name])
            yield by_name[name], sorted(together, key=lambda result: result.index), slowest


def ask(shard: Shard, tell: Callable[[tuple[str, list[Result], float]], None]) -> None:
    """Ask one engine everything, arm after arm; each arm's name, results and seconds are told as soon as it is done."""
    asyncio.run(_ask(shard, tell))


async def _ask(shard: Shard, tell: Callable[[tuple[str, list[Result], float]], None]) -> None:
    thinking = ThinkingParams(thinking_token_budget=shard.budget)
    engine = await AsyncEngine.start(shard.config)
    try:
        for arm, numbers in shard.questions:
            wanted = [evaluation.suite_questions(shard.suite, 1, number)[0] for number in numbers]
            sampling = replace(shard.sampling, seed=(shard.sampling.seed or 0) + arm.seed)
            found, seconds = await evaluation.evaluate(
                engine,
                wanted,
                replace(sampling, n=1) if arm.how else sampling,
                thinking,
                arm.fold,
                arm.control,
                arm.how,
                in_flight=shard.in_flight or len(wanted),
                on_result=lambda _: None,
            )
            tell((arm.name, found, seconds))
    finally:
        await engine.stop()
