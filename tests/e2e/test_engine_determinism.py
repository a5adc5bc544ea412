"""Rule 10 on the real model path (random weights, fp32, CPU): neighbours change no bit."""

import asyncio

import pytest

from tests.small_pebble import PAGE_BYTES, small_pebble
from tests.together import Together
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.llm import collect
from thinkfold.runner import loader
from thinkfold.runner.invariance import invariant_tile
from thinkfold.types import SamplingParams, ThinkingParams

NO_LIMIT = ThinkingParams(thinking_token_budget=-1)
QUESTIONS = ["What is 12 * 3?", "Name a town. " * 9, "x", "Sort 3 1 2 please, and then sort it again. " * 4]


def config(**changes):
    base = {"model": small_pebble(), "load_format": "dummy", "kv_cache_bytes": 32 << 20, "max_num_seqs": 8}
    return EngineConfig(**{**base, **changes})


def sampling(i, **changes):
    base = {"temperature": 0.8, "top_p": 0.95, "seed": i, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**{**base, **changes})


async def answers(config, *, together, repeat=1, n=1):
    """(token ids, log-probs) of every question's every choice."""
    engine = await AsyncEngine.start(config, build=Together(len(QUESTIONS) * repeat if together else 1))
    try:
        prompts = [engine.prompts.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
        jobs = [collect(engine, p, sampling(i, n=n), NO_LIMIT) for i, p in enumerate(prompts * repeat)]
        results = list(await asyncio.gather(*jobs)) if together else [await job for job in jobs]
        stats = engine.stats()
    finally:
        await engine.stop()
    return [[(o.token_ids, [p.logprob for p in o.logprobs]) for o in r.outputs] for r in results], stats


@pytest.fixture(scope="module")
def alone():
    return asyncio.run(answers(config(enable_prefix_caching=False), together=False))[0]


async def test_alone_equals_a_busy_batch_bit_by_bit(alone):
    busy, _ = await answers(config(enable_prefix_caching=False), together=True)
    assert busy == alone


async def test_it_holds_for_the_shipped_weights_too():
    """They are read in 16 bits, which random ones are not."""
    shipped = config(model="pebble", load_format="auto", enable_prefix_caching=False)
    if invariant_tile(loader.load(shipped).model) is None:
        pytest.skip("matrix products in 16 bits change with the batch on this machine")
    (one_by_one, _), (busy, _) = await answers(shipped, together=False), await answers(shipped, together=True)
    assert busy == one_by_one


async def test_other_prefill_chunks_change_nothing(alone):
    chunked, _ = await answers(config(max_num_batched_tokens=7, enable_prefix_caching=False), together=True)
    assert chunked == alone


async def test_one_step_ahead_changes_nothing(alone):
    ahead, _ = await answers(config(pipeline_depth=1), together=True)
    assert ahead == alone


async def test_preemption_changes_nothing(alone):
    squeezed, stats = await answers(config(kv_cache_bytes=10 * PAGE_BYTES, admission="greedy"), together=True)
    assert stats.preemptions > 0
    assert squeezed == alone


async def test_case_34_choice_0_is_the_single_run_and_choices_repeat(alone):
    many, _ = await answers(config(), together=True, n=3)
    again, _ = await answers(config(), together=False, n=3)
    assert many == again
    assert [choices[:1] for choices in many] == alone
    assert all(len({tuple(ids) for ids, _ in choices}) == 3 for choices in many)


async def test_case_37_a_prefix_hit_equals_a_cold_run(alone):
    """Prompts around page borders, cold and hot, with neighbours, after the pool was recycled."""
    engine = await AsyncEngine.start(config(kv_cache_bytes=44 * PAGE_BYTES))
    greedy = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    try:
        for length in (15, 16, 17, 32, 33):
            prompt = [(7 * i + length) % 1500 for i in range(length)]

            async def run(prompt=prompt):
                output = await collect(engine, prompt, greedy, NO_LIMIT)
                return output.outputs[0].token_ids, [p.logprob for p in output.outputs[0].logprobs]

            cold = await run()
            hot = await asyncio.gather(*(run() for _ in range(4)))
            await collect(engine, [(3 * i) % 1500 for i in range(600)], greedy, NO_LIMIT)  # recycles the pool
            assert [*hot, await run()] == [cold] * 5
        assert engine.stats().prefix_hit_tokens > 0
    finally:
        await engine.stop()
