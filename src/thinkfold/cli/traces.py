"""Recorded answers: what a model writes greedily, and where its thinking would be cut and folded."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import ParameterError
from thinkfold.llm import collect
from thinkfold.thinking.family import Family
from thinkfold.thinking.tracker import Tracker
from thinkfold.types import UNLIMITED, FoldParams, FoldProfile, Phase, SamplingParams, ThinkingParams


@dataclass(frozen=True, slots=True)
class Trace:
    """A prompt and the answer to it, as token ids."""

    prompt: list[int]
    output: list[int]


async def write_traces(config: EngineConfig, questions: Sequence[str], max_tokens: int | None = None) -> list[Trace]:
    """The model's greedy answers with unlimited thinking and full KV, in the order of the questions."""
    engine = await AsyncEngine.start(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    thinking = ThinkingParams(thinking_token_budget=UNLIMITED)
    try:
        prompts = [list(engine.prompts.encode_chat([{"role": "user", "content": text}])) for text in questions]
        with tqdm(total=len(prompts), unit="trace", file=sys.stderr) as bar:

            async def one(prompt: list[int]) -> Trace:
                output = await collect(engine, prompt, sampling, thinking, FoldParams(policy="off"))
                bar.update()
                return Trace(prompt, list(output.outputs[0].token_ids))

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
    finally:
        await engine.stop()
    return [task.result() for task in tasks]


def save(path: Path, traces: Sequence[Trace]) -> None:
    """One JSON line a trace."""
    path.write_text("".join(json.dumps(asdict(trace)) + "\n" for trace in traces), encoding="utf-8")


def load(path: Path) -> list[Trace]:
    """What `save` wrote. Raises ParameterError."""
    try:
        return [Trace(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise ParameterError("traces", f"cannot read {path.name}: {error}") from error


def cuts(family: Family, trace: Trace, numbers: FoldProfile) -> tuple[list[int], int | None]:
    """Ends of the segments of thinking and the first token of the answer, as indices into the output."""
    tracker = Tracker(
        family,
        family.prompt_state(trace.prompt),
        min_segment_tokens=numbers.min_segment_tokens,
        max_segment_tokens=numbers.max_segment_tokens,
    )
    answer_start = None
    for index, token_id in enumerate(trace.output):
        tracker.push(token_id)
        if answer_start is None and tracker.phase is Phase.ANSWER:
            answer_start = index + 1
    tracker.flush()
    return [segment.end for segment in tracker.take_segments()], answer_start
