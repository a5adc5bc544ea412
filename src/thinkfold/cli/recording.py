"""One process of a recording: an engine of its own that is asked its share of a suite's problems."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from thinkfold.cli.evaluation import suite_questions
from thinkfold.cli.records import Recorder
from thinkfold.config import EngineConfig
from thinkfold.control.replay import Record
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.language import load_language
from thinkfold.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Share:
    """What one process asks: problem number i samples with seed `sampling.seed + i`.

    `in_flight` problems at a time; none is begun after `seconds`. `probe_every` 0 takes no probes.
    """

    suite: str
    numbers: list[int]
    config: EngineConfig
    sampling: SamplingParams
    probe_every: int
    in_flight: int
    seconds: float


def record(share: Share, tell: Callable[[list[Record]], None]) -> None:
    """Tell the records of each problem as soon as its samples and probes are done."""
    asyncio.run(_record(share, tell))


async def _record(share: Share, tell: Callable[[list[Record]], None]) -> None:
    engine = await AsyncEngine.start(share.config)
    recorder = Recorder(engine, load_language(share.config), every=share.probe_every)
    gate, until = asyncio.Semaphore(share.in_flight), time.monotonic() + share.seconds

    async def one(number: int) -> None:
        async with gate:
            if time.monotonic() < until:
                (question,) = suite_questions(share.suite, 1, number)
                tell(await recorder.record(question, replace(share.sampling, seed=(share.sampling.seed or 0) + number)))

    try:
        async with asyncio.TaskGroup() as group:
            for number in share.numbers:
                group.create_task(one(number))
    finally:
        await engine.stop()
