"""Ranks that are processes: a lost one ends the engine with its name, and none outlives the engine."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from tests.small_pebble import small_pebble
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import EngineDeadError
from thinkfold.llm import collect
from thinkfold.types import SamplingParams, ThinkingParams

SMALL = {"model": small_pebble(), "load_format": "dummy", "kv_cache_bytes": 32 << 20, "tensor_parallel_size": 2}
NO_LIMIT = ThinkingParams(thinking_token_budget=-1)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
LONG = SamplingParams(max_tokens=8000, ignore_eos=True)


def started(before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes of multiprocessing below this one that were not there before."""
    found = set(psutil.Process().children(recursive=True)) - before
    return [process for process in found if "spawn_main" in " ".join(process.cmdline())]


async def gone(processes: list[psutil.Process]) -> None:
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    assert not left, "a process is left behind"


async def test_a_rank_that_is_killed_is_named_and_a_core_that_is_killed_takes_its_ranks_along():
    before = set(psutil.Process().children(recursive=True))
    here, there = await asyncio.gather(
        AsyncEngine.start(EngineConfig(**SMALL)), AsyncEngine.start(EngineConfig(**SMALL, own_process=True))
    )
    try:
        everybody = {process.pid: process for process in started(before)}
        assert len(everybody) == 3
        core = everybody[there._client._process.pid]
        (rank,) = [p for p in everybody.values() if p.ppid() == os.getpid() and p != core]
        prompt = here.prompts.encode_chat([{"role": "user", "content": "hi"}])
        jobs = [collect(engine, prompt, SHORT, NO_LIMIT) for engine in (here, there)]
        ours, theirs = await asyncio.gather(*jobs)
        assert ours.error is None and ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        stream = here.generate(prompt, LONG, NO_LIMIT)
        await anext(stream)
        rank.kill()
        with pytest.raises(EngineDeadError, match="rank 1 of 2 has gone"):
            async for _ in stream:
                pass
        await asyncio.wait_for(here.ended.wait(), 10)
        assert not here.health().alive
        core.kill()
        await asyncio.wait_for(there.ended.wait(), 10)
    finally:
        await here.stop()
        await there.stop()
    await gone(list(everybody.values()))
