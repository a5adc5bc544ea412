"""Faults injected into folds of a whole engine: they end their request, and nobody else's (rule 11)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import test_engine_folds as folds
from test_engine_folds import QUESTIONS, answers, config

from tests.together import Together
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.core import EngineCore
from thinkfold.errors import EngineDeadError, ThinkfoldError
from thinkfold.llm import collect
from thinkfold.runner.faults import is_device_fault
from thinkfold.runner.folder import Folder
from thinkfold.scheduler.folding import FoldDesk
from thinkfold.types import FoldParams, SamplingParams

short_segments = folds.short_segments


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every step is followed by a check of all structures."""
    step = EngineCore.step

    def checked_step(self):
        outputs = step(self)
        self.check_integrity()
        return outputs

    monkeypatch.setattr(EngineCore, "step", checked_step)


async def run(**changes):
    """Results by question, drawn as in `answers`, and the engine's counters; one more request is served after them."""
    engine = await AsyncEngine.start(config(**changes), build=Together(len(QUESTIONS)))
    try:
        end = engine.family.end_token_id
        base = SamplingParams(
            temperature=0.8,
            max_tokens=folds.LENGTH,
            logprobs=0,
            ignore_eos=True,
            forced_tokens=(folds.THINK,),
            logit_bias={end: -100.0},
        )
        prompts = [engine.prompts.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
        jobs = [collect(engine, p, replace(base, seed=i), folds.NO_LIMIT) for i, p in enumerate(prompts)]
        results = await asyncio.gather(*jobs)
        later = await collect(engine, prompts[0], SamplingParams(max_tokens=5))
        assert later.error is None
        return results, engine.stats()
    finally:
        await engine.stop()


def raising(monkeypatch, owner, name, *, at, error):
    """The call number `at` of a method raises."""
    method, calls = getattr(owner, name), []

    def fails(self, *args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            raise error
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    return calls


@pytest.fixture(scope="module")
def whole():
    """What the requests draw where nothing fails."""
    return [choices[0][0] for choices in asyncio.run(answers(config(), together=False))[0]]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [(Folder, "prepare", 2), (Folder, "commit", 3), (Folder, "_write", 2), (FoldDesk, "_gain", 4)],
)
async def test_a_fold_that_raises_ends_its_request_only(monkeypatch, whole, depth, owner, name, at):
    calls = raising(monkeypatch, owner, name, at=at, error=ValueError("a selector of my own"))
    results, stats = await run(pipeline_depth=depth)
    assert len(calls) > at, "others folded on"
    (failed,) = [r for r in results if r.error is not None]
    assert "a selector of my own" in failed.error
    assert [o.finish_reason for o in failed.outputs] == ["error"]
    for result, tokens in zip(results, whole, strict=True):
        assert result is failed or result.outputs[0].token_ids == tokens, "a neighbour's fault changes no token"
    assert stats.kv_pages.held == 0, f"pages are left behind: {stats.pages_by_class}"


async def test_a_fold_for_want_of_memory_that_raises_ends_its_request_only(monkeypatch):
    calls = raising(monkeypatch, FoldDesk, "_gain", at=2, error=ValueError("no gain is known"))
    results, _ = await run(kv_cache_bytes=22 * folds.PAGE_BYTES, admission="greedy", fold_policy="pressure")
    assert len(calls) > 2
    (failed,) = [r for r in results if r.error is not None]
    assert "no gain is known" in failed.error
    assert all(len(r.outputs[0].token_ids) == folds.LENGTH for r in results if r is not failed)


async def test_a_device_that_breaks_in_a_fold_ends_the_engine(monkeypatch):
    raising(monkeypatch, Folder, "prepare", at=1, error=RuntimeError("CUDA error: an illegal memory access"))
    engine = await AsyncEngine.start(config())
    try:
        end = engine.family.end_token_id
        sampling = SamplingParams(
            max_tokens=folds.LENGTH, ignore_eos=True, forced_tokens=(folds.THINK,), logit_bias={end: -100.0}
        )
        with pytest.raises((EngineDeadError, ThinkfoldError)):
            await collect(engine, [5, 6, 7], sampling, folds.NO_LIMIT, fold=FoldParams(policy="eager"))
        assert not engine.health().alive
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("selector"), False),
    ],
)
def test_faults_of_the_device_are_told_from_faults_of_a_fold(error, fault):
    assert is_device_fault(error) == fault
