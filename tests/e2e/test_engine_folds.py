"""Folding through the whole engine (random weights, fp32, CPU): rule 10 holds for eager folds, too."""

import asyncio

import pytest
import torch
from transformers import AutoTokenizer

from tests.small_pebble import NUM_LAYERS, PAGE_BYTES, small_pebble
from tests.together import Together
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.llm import collect
from thinkfold.pebble import pebble_path
from thinkfold.runner.storage import page_bytes
from thinkfold.types import FOLD_PROFILES, FoldParams, FoldProfile, SamplingParams, ThinkingParams

NO_LIMIT = ThinkingParams(thinking_token_budget=-1)
LENGTH = 130
QUESTIONS = ["What is 12 * 3?", "Name a town. " * 9, "x"]
THINK = AutoTokenizer.from_pretrained(pebble_path()).convert_tokens_to_ids("<think>")
PLAIN_BYTES = page_bytes(NUM_LAYERS, 2, 16, 64, torch.float32)  # of a page without room for β


@pytest.fixture(scope="module", autouse=True)
def short_segments():
    """Numbers that fold a response of this length several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FOLD_PROFILES, "fine", FoldProfile(48, 16, 12, 16, 8))
        yield


def config(**changes):
    base = {
        "model": small_pebble(),
        "load_format": "dummy",
        "kv_cache_bytes": 400 * PAGE_BYTES,
        "max_num_seqs": 8,
        "own_process": False,
        "fold_profile": "fine",
        "fold_policy": "eager",
    }
    return EngineConfig(**{**base, **changes})


async def answers(config, *, together, fold=None, n=1):
    """Token ids, log-probs and folds of every question's every choice, and the engine's counters."""
    engine = await AsyncEngine.start(config, build=Together(len(QUESTIONS) if together else 1))
    try:
        jobs = []
        for i, question in enumerate(QUESTIONS):
            prompt = engine.prompts.encode_chat([{"role": "user", "content": question}])
            sampling = SamplingParams(
                temperature=0.8,
                seed=i,
                max_tokens=LENGTH,
                logprobs=0,
                ignore_eos=True,
                n=n,
                forced_tokens=(THINK,),
                logit_bias={engine.family.end_token_id: -100.0},  # random weights would close thinking soon
            )
            jobs.append(collect(engine, prompt, sampling, NO_LIMIT, fold=fold))
        results = list(await asyncio.gather(*jobs)) if together else [await job for job in jobs]
        stats = engine.stats()
    finally:
        await engine.stop()
    assert all(r.error is None for r in results)
    outputs = [[(o.token_ids, [p.logprob for p in o.logprobs]) for o in r.outputs] for r in results]
    spans = [[[(f.start, f.end, f.entries, f.refused) for f in o.folds] for o in r.outputs] for r in results]
    return outputs, spans, stats, results


@pytest.fixture(scope="module")
def alone():
    return asyncio.run(answers(config(), together=False))


def test_segments_fold_and_the_tokens_feel_it(alone):
    outputs, spans, stats, results = alone
    assert stats.folds == sum(len(s) for choices in spans for s in choices) >= 4
    assert stats.pages_by_class["summary"] == 0, "a finished request keeps nothing"
    raw, none, _, _ = asyncio.run(answers(config(), together=False, fold=FoldParams(policy="off")))
    assert none == [[[]]] * len(QUESTIONS)
    for (ids, logprobs), (raw_ids, raw_logprobs), folds in zip(
        *([c[0] for c in part] for part in (outputs, raw, spans)), strict=True
    ):
        first = folds[0][1] + 12  # nothing is folded before
        assert ids[:first] == raw_ids[:first] and logprobs[:first] == raw_logprobs[:first]
        assert logprobs != raw_logprobs
    assert all(r.costs.folds == len(s[0]) for r, s in zip(results, spans, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline_depth": 1},
        {"max_num_batched_tokens": 5},
        {"kv_cache_bytes": 22 * PAGE_BYTES, "admission": "greedy"},
        {"kv_cache_bytes": 22 * PAGE_BYTES, "admission": "greedy", "swap_space_bytes": 64 * PAGE_BYTES},
    ],
    ids=["busy", "one step ahead", "small chunks", "preempted", "swapped"],
)
async def test_eager_folds_do_not_depend_on_neighbours_bit_by_bit(alone, changes):
    outputs, spans, stats, _ = await answers(config(**changes), together=True)
    assert spans == alone[1]
    assert outputs == alone[0]
    if "admission" in changes:
        assert stats.pressure["swap" if "swap_space_bytes" in changes else "preempt"] > 0


async def test_segments_that_a_regex_ends_fold_alike_alone_and_preempted(alone):
    by_regex = {"fold_delimiter_regex": "[a-m] ?[n-z]"}
    one, spans, _, _ = await answers(config(**by_regex), together=False)
    tight = {"kv_cache_bytes": 22 * PAGE_BYTES, "admission": "greedy", "pipeline_depth": 1}
    other, others, stats, _ = await answers(config(**by_regex, **tight), together=True)
    assert (other, others) == (one, spans) and stats.folds > 0
    assert spans != alone[1], "it ends other segments"


async def test_choices_fold_each_for_itself(alone):
    many, spans, _, _ = await answers(config(), together=True, n=2)
    assert [choices[:1] for choices in many] == alone[0]
    assert all(len(folds) > 0 for choices in spans for folds in choices)


async def test_pressure_with_ample_memory_equals_off():
    off, _, _, _ = await answers(config(fold_policy="off"), together=True)
    pressure, _, stats, _ = await answers(config(fold_policy="pressure"), together=True)
    assert pressure == off and stats.folds == 0


async def test_pressure_folds_instead_of_preempting():
    tight = {"kv_cache_bytes": 22 * PAGE_BYTES, "admission": "greedy"}
    _, _, off, _ = await answers(config(fold_policy="off", **tight), together=True)
    _, _, pressure, _ = await answers(config(fold_policy="pressure", **tight), together=True)
    assert off.preemptions > 0
    assert pressure.folds > 0 and pressure.preemptions < off.preemptions


def test_eager_folds_into_four_bits_give_the_same_tokens_alone_and_together():
    """With as many entries as fill the same bytes, and not those of a fold in the model's dtype."""
    small = {"fold_storage": "int4", "kv_cache_bytes": 400 * PLAIN_BYTES}
    alone, spans, stats, results = asyncio.run(answers(config(**small), together=False))
    busy, others, _, _ = asyncio.run(answers(config(**small), together=True))
    assert (alone, spans) == (busy, others)
    assert stats.folds >= 4 and stats.quantised == 0
    kept = [entries for choices in spans for choice in choices for *_, entries, refused in choice if not refused]
    assert all(entries > 8 for entries in kept), "six times the entries in the bytes of eight, or the whole span"
    assert all(r.costs.quantised_tokens == 0 < r.costs.folded_tokens for r in results)


def test_short_memory_quantises_before_it_folds_and_forces_nobody_out():
    tight = config(
        fold_policy="pressure", fold_storage="int4", kv_cache_bytes=30 * PLAIN_BYTES, enable_prefix_caching=False
    )
    _, _, stats, results = asyncio.run(answers(tight, together=True))
    assert stats.pressure.get("quantise", 0) >= stats.quantised > 0
    assert stats.preemptions == 0
    assert sum(r.costs.quantised_tokens for r in results) == stats.quantised_tokens > 0
    told = [fold for r in results for o in r.outputs for fold in o.folds]
    assert any(fold.quantised and fold.entries == fold.end - fold.start for fold in told)
    assert stats.pages_by_class["summary"] == 0
