"""A model over several ranks, here threads joined by gloo, draws the tokens of one, whatever the engine does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from tests.near import assert_same_top
from tests.together import Together
from tests.unit.thread_ranks import build_with_threads, checkpoint, load_alone
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.build import build_core
from thinkfold.engine.core import EngineCore
from thinkfold.llm import collect
from thinkfold.pebble import pebble_path
from thinkfold.runner import loader
from thinkfold.runner.storage import page_bytes
from thinkfold.types import FOLD_PROFILES, FoldProfile, Grammar, SamplingParams, ThinkingParams, Until

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
        "fold_policy": "eager",
        "watchdog_s": 30.0,
    }
    return EngineConfig(**base | changes)


async def answers(config, *, length=90, questions=QUESTIONS, **sampling):
    """Results by question, all asked together, and the engine's counters."""
    build = build_with_threads if config.tensor_parallel_size > 1 else build_core
    engine = await AsyncEngine.start(config, build=Together(len(questions), build))
    try:
        base = SamplingParams(
            temperature=0.8,
            max_tokens=length,
            logprobs=2,
            ignore_eos=True,
            forced_tokens=(THINK,),
            logit_bias={engine.family.end_token_id: -100.0},  # random weights would close thinking soon
        )
        prompts = [engine.prompts.encode_chat([{"role": "user", "content": q}]) for q in questions]
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
                assert_same_top(a.top, b.top, error)
            spans = [[(f.start, f.end, f.entries, f.refused) for f in o.folds] for o in (mine, theirs)]
            assert spans[0] == spans[1]
            for a, b in zip(mine.folds, theirs.folds, strict=True):
                assert a.error == pytest.approx(b.error, abs=error)
    assert stats.kv_pages.held == 0, f"pages are left behind: {stats.pages_by_class}"
    return stats


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"pipeline_depth": 1, "max_num_batched_tokens": 5}),
        ("qwen2", {}),
        ("llama", {"fold_policy": "off"}),
    ],
)
async def test_two_ranks_draw_the_tokens_of_one(tmp_path, kind, changes):
    """Folded or not, at once or a step ahead, and where a prompt is longer than a chunk."""
    folder = checkpoint(tmp_path, kind)
    stats = await same(config(folder, **changes), config(folder, 2, **changes))
    assert (stats.folds >= 3) is (changes.get("fold_policy") != "off")


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": 24, "admission": "greedy", "fold_policy": "pressure"},
        {"pages": 20, "admission": "greedy", "swap_space_bytes": 256 * PAGE_BYTES},
        {"pages": 100, "kv_cache_dtype": "auto"},
        {"pages": 20, "admission": "greedy", "fold_storage": "int4"},
    ],
    ids=["pressure", "swapped", "fp8", "int4"],
)
async def test_memory_of_all_kinds_is_split(qwen3, changes):
    two = {**changes, "swap_space_bytes": changes.get("swap_space_bytes", 0) // 2}
    stats = await same(config(qwen3, **changes), config(qwen3, 2, **two), error=2e-3)
    assert stats.folds > 0
    if changes.get("admission") == "greedy":
        rung = {"pressure": "fold", "int4": "preempt"}.get(changes.get("fold_policy") or changes.get("fold_storage"))
        assert stats.pressure[rung or "swap"] > 0


async def test_pebble_with_the_table_that_it_is_shipped_with():
    """Also where no head of one rank has an entry that stands for others, and another's has."""
    changes = {"kv_cache_bytes": 32 << 20}
    stats = await same(config("pebble", **changes), config("pebble", 2, **changes), length=78, questions=QUESTIONS[2:])
    assert stats.folds >= 1


async def test_four_ranks_of_two_kv_heads_hold_each_twice(tmp_path):
    """Folds of two copies of a head are two folds: tokens are those of one card only until the first."""
    folder = checkpoint(tmp_path, "qwen3", num_key_value_heads=2)
    (one,), _ = await answers(config(folder), length=78, questions=QUESTIONS[2:])
    (four,), stats = await answers(config(folder, 4), length=78, questions=QUESTIONS[2:])
    assert four.error is None and stats.folds >= 1 and stats.kv_pages.held == 0
    raw = four.outputs[0].folds[0].end
    assert four.outputs[0].token_ids[:raw] == one.outputs[0].token_ids[:raw]
    assert [o.folds[0].end for o in (*one.outputs, *four.outputs)] == [raw, raw]


async def everything(config):
    """What becomes of one engine's requests that fork, go back, are probed, bound by a grammar, cached or given up."""
    build = build_with_threads if config.tensor_parallel_size > 1 else build_core
    engine = await AsyncEngine.start(config, build=build)
    try:
        base = SamplingParams(
            temperature=0.8, seed=3, max_tokens=90, ignore_eos=True, forced_tokens=(THINK,), frequency_penalty=0.4
        )
        base = replace(base, logit_bias={engine.family.end_token_id: -100.0})
        prompt = engine.prompts.encode_chat([{"role": "user", "content": QUESTIONS[1]}])
        given_up = engine.generate(prompt, replace(base, max_tokens=600, n=2), NO_LIMIT, request_id="given up")
        found = []
        while (await anext(given_up)).outputs[0].num_output_tokens < 20:
            pass
        part = [o async for o in engine.generate(prompt, base, NO_LIMIT, until=Until(max_tokens=70))]
        handle = part[-1].outputs[0].handle
        await engine.pause("given up")
        probe = await engine.probe("given up", engine.prompts.encode_more("So: "), 5, choice=1)
        assert len(probe.token_ids) == 5
        await given_up.aclose()
        for seed in (9, None):
            child = [o async for o in engine.extend(handle.id, seed=seed)]
            found.append([t for o in child for t in o.outputs[0].token_ids])
        bound = replace(base, grammar=Grammar.regex("[a-d]{5,9}"), ignore_eos=False, forced_tokens=(), logit_bias={})
        again = await collect(engine, prompt, bound, ThinkingParams(enabled=False))
        found.append((again.outputs[0].text, again.costs.cached_tokens))
        many = await collect(engine, prompt, replace(base, n=3, top_k=20, min_tokens=5), NO_LIMIT)
        found.append([o.token_ids for o in many.outputs])
        await engine.drop(handle.id)
        return found, engine.stats()
    finally:
        await engine.stop()


async def test_forks_probes_grammars_and_those_who_give_up(qwen3):
    (one, _), (two, stats) = await everything(config(qwen3)), await everything(config(qwen3, 2, pipeline_depth=1))
    assert two == one
    assert stats.folds > 3 and stats.kv_pages.held == 0
