"""Ranks that are threads and fail: a fold, a step, a line or a start of one of them, and what becomes of the others."""

from __future__ import annotations

import asyncio

import pytest
import test_tensor_parallel as parallel
from test_tensor_parallel import NO_LIMIT, answers, config

from tests.unit.thread_ranks import build_with_threads, load_alone
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.llm import collect
from thinkfold.runner import loader
from thinkfold.runner.folder import Folder
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.types import SamplingParams

short_segments, qwen3 = parallel.short_segments, parallel.qwen3


@pytest.mark.parametrize("name", ["prepare", "commit"])
async def test_a_fold_that_another_rank_fails_ends_its_request_only(qwen3, monkeypatch, name):
    method, failed = getattr(Folder, name), []

    def fails(self, work, *more):
        if self._own._shard.rank and not failed:
            failed.append(work.fold_id)
            raise ValueError("not here")
        return method(self, work, *more)

    monkeypatch.setattr(Folder, name, fails)
    results, stats = await answers(config(qwen3, 2))
    assert [r.error is None for r in results].count(False) == len(failed) == 1
    assert next(r.error for r in results if r.error).endswith("a fold failed: on another rank, see its log")
    assert stats.folds >= 2 and stats.kv_pages.held == 0


async def test_what_a_rank_raises_is_what_the_engine_died_of(qwen3, monkeypatch):
    follow, calls = ModelRunner.follow, []

    def fails(self, plan):
        calls.append(plan.step)
        if len(calls) == 5:
            raise IndexError("a bug of mine")
        follow(self, plan)

    monkeypatch.setattr(ModelRunner, "follow", fails)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has failed: IndexError: a bug of mine"):
        await answers(config(qwen3, 2))


async def test_an_idle_engine_notices_that_a_rank_is_lost(qwen3):
    cores = []

    def build(config):
        core, model = build_with_threads(config)
        cores.append(core)
        return core, model

    engine = await AsyncEngine.start(config(qwen3, 2), build=build)
    try:
        cores[0].ranks._ranks._lines[0].send_bytes(b"no plan")
        await asyncio.wait_for(engine.ended.wait(), 20)
        assert not engine.health().alive
        with pytest.raises(EngineDeadError, match="rank 1 of 2 has failed: UnpicklingError"):
            await collect(engine, [5], SamplingParams(max_tokens=2), NO_LIMIT)
    finally:
        await engine.stop()


async def test_a_rank_that_cannot_start_says_why(qwen3, monkeypatch):
    def no_room(config, shard):
        if shard.rank:
            raise ParameterError("kv_cache_bytes", "rank 1 has no room")
        return load_alone(config, shard)

    monkeypatch.setattr(loader, "load", no_room)
    with pytest.raises(ParameterError, match="rank 1 has no room"):
        await AsyncEngine.start(config(qwen3, 2), build=build_with_threads)
    monkeypatch.setattr(loader, "load", load_alone)
    with pytest.raises(ParameterError, match="max_model_len"):
        await AsyncEngine.start(config(qwen3, 2, max_model_len=10**6), build=build_with_threads)
