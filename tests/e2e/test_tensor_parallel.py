"""A model over several ranks, here threads joined by gloo, draws the tokens of one, whatever the engine does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from tests.unit.thread_ranks import build_with_threads, checkpoint, load_alone
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.build import build_core
from thinkfold.engine.core import EngineCore
from thinkfold.llm import collect
from thinkfold.pebble import pebble_path
from thinkfold.runner import loader
from thinkfold.runner.storage import page_bytes
from thinkfold.types import FOLD_PROFILES, FoldProfile, SamplingParams, ThinkingParams

THINK = AutoTokenizer.from_pretrained(pebble_path()).convert_tokens_to_ids("<think>")
NO_LIMIT = ThinkingParams(thinking_token_budget=-1)
QUESTIONS = ["What is 12 * 3?", "Name a town. " * 9, "x"]
PAGE_BYTES = page_bytes(2, 4, 16, 16, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def short_segments():
    """Numbers that fold a response of 110 tokens several times; every step is followed by a check of all structures."""
    advance = EngineCore.advance

    def checked(self):
        advance(self)
        self.check_integrity()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FOLD_PROFILES, "fine", FoldProfile(48, 16, 12, 16, 8))
        patch.setattr(loader, "load", load_alone)
        patch.setattr(EngineCore, "advance", checked)
        yield


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("one"), "qwen3", tie_word_embeddings=True)


def config(model, ranks=1, pages=400, **changes):
    """Of several ranks each has its part of the same pages."""
    base = {
        "model": str(model),
        "tensor_parallel_size": ranks,
        "kv_cache_bytes": pages * PAGE_BYTES // ranks,
        "max_num_seqs": 8,
        "own_process": False,
        "fold_profile": "fine",
        "watchdog_s": 30.0,
    }
    return EngineConfig(**base | changes)


async def answers(config, *, length=110, **sampling):
    """Results by question, all asked together, and the engine's counters."""
    build = build_with_threads if config.tensor_parallel_size > 1 else build_core
    engine = await AsyncEngine.start(config, build=build)
    try:
        base = SamplingParams(
            temperature=0.8,
            max_tokens=length,
            logprobs=2,
            ignore_eos=True,
            forced_tokens=(THINK,),
            logit_bias={engine.family.end_token_id: -100.0},  # random weights would close thinking soon
        )
        prompts = [engine.prompts.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
        jobs = [collect(engine, p, replace(base, seed=i, **sampling), NO_LIMIT) for i, p in enumerate(prompts)]
        results = await asyncio.gather(*jobs)
        return results, engine.stats()
    finally:
        await engine.stop()


async def same(one, many, *, error=2e-4, **sampling):
    """Both draw the same tokens, fold the same spans and estimate the same errors; counters of the second."""
    (results, _), (others, stats) = await answers(one, **sampling), await answers(many, **sampling)
    for result, other in zip(results, others, strict=True):
        assert result.error is None and other.error is None
        for mine, theirs in zip(result.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=error)
                assert [i for i, _ in a.top] == [i for i, _ in b.top]
            spans = [[(f.start, f.end, f.entries, f.refused) for f in o.folds] for o in (mine, theirs)]
            assert spans[0] == spans[1]
            for a, b in zip(mine.folds, theirs.folds, strict=True):
                assert a.error == pytest.approx(b.error, abs=error)
    assert stats.kv_pages.held == 0, f"pages are left behind: {stats.pages_by_class}"
    return stats


@pytest.mark.parametrize("policy", ["off", "eager"])
async def test_two_ranks_draw_the_tokens_of_one(model, policy):
    stats = await same(config(model, fold_policy=policy), config(model, 2, fold_policy=policy))
    assert (stats.folds >= 3) is (policy == "eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_depth": 1, "max_num_batched_tokens": 5},
        {"pages": 24, "admission": "greedy", "fold_policy": "pressure"},
        {"pages": 24, "admission": "greedy", "swap_space_bytes": 256 * PAGE_BYTES},
        {"kv_cache_dtype": "auto", "pages": 100},
        {"fold_storage": "int4", "pages": 24, "admission": "greedy"},
    ],
    ids=["small chunks, a step ahead", "pressure", "swapped", "fp8", "int4"],
)
async def test_memory_of_all_kinds_is_split(qwen3, changes):
    changes = {"fold_policy": "eager", **changes}
    two = dict(changes)
    if "swap_space_bytes" in two:
        two["swap_space_bytes"] //= 2
    stats = await same(config(qwen3, **changes), config(qwen3, 2, **two), error=2e-3)
    assert stats.folds > 0
    print(stats.pressure, stats.folds)


async def test_four_ranks_of_two_kv_heads_hold_each_twice(tmp_path):
    folder = checkpoint(tmp_path, "qwen3", num_key_value_heads=2)
    await same(config(folder, fold_policy="off"), config(folder, 4, fold_policy="off"))


async def test_branches_penalties_and_bans_are_rank_0s_business(qwen3):
    sampling = {"n": 3, "frequency_penalty": 0.7, "top_k": 30, "repetition_penalty": 1.2, "min_tokens": 20}
    await same(config(qwen3, fold_policy="eager"), config(qwen3, 2, fold_policy="eager"), **sampling)
