"""Probes through the whole engine (random weights, fp32, CPU): the main stream does not feel them, bit by bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_engine_folds import NO_LIMIT, THINK, config

from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.types import FOLD_PROFILES, FoldProfile, RequestOutput, SamplingParams

TOKENS = 160


@pytest.fixture(scope="module", autouse=True)
def short_segments():
    """Numbers that fold a response of this length several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FOLD_PROFILES, "fine", FoldProfile(48, 16, 12, 16, 8))
        yield


async def run(engine: AsyncEngine, every: int) -> tuple[RequestOutput, list[Any]]:
    """One response, probed after every so many tokens (0: never)."""
    prompt = engine.prompts.encode_chat([{"role": "user", "content": "What is 12 * 3?"}])
    question = engine.prompts.encode_more("\n\nFinal answer: ")
    sampling = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=TOKENS,
        logprobs=0,
        ignore_eos=True,
        forced_tokens=(THINK,),
        logit_bias={engine.family.end_token_id: -100.0},
        presence_penalty=0.3,
    )
    total, found, next_at = None, [], every
    async for output in engine.generate(prompt, sampling, NO_LIMIT, request_id="main"):
        if total is None:
            total = output
        else:
            total.merge(output)
        if every and total.outputs[0].num_output_tokens >= next_at and not output.finished:
            next_at += every
            asked = (engine.probe("main", question, 6), engine.peek("main"), engine.peek("main", question))
            found += await asyncio.gather(*asked, return_exceptions=True)
    assert total is not None
    return total, found


@pytest.mark.parametrize("changes", [{"fold_policy": "off"}, {}, {"pipeline_depth": 1}], ids=["raw", "folds", "ahead"])
async def test_case_25_the_main_stream_is_the_same_with_and_without_probes(changes):
    engine = await AsyncEngine.start(config(**changes))
    try:
        plain, _ = await run(engine, 0)
        probed, found = await run(engine, 12)
        held = engine.stats().kv_pages.held
    finally:
        await engine.stop()
    (ours,), (theirs,) = plain.outputs, probed.outputs
    assert ours.token_ids == theirs.token_ids
    assert [p.logprob for p in ours.logprobs] == [p.logprob for p in theirs.logprobs]
    spans = [[(f.start, f.end, f.error) for f in o.folds] for o in (ours, theirs)]
    assert spans[0] == spans[1] and bool(spans[0]) is ("fold_policy" not in changes)
    answered = [r for r in found if not isinstance(r, Exception) and r.dropped is None]
    assert len(answered) >= 9, found
    assert {len(r.token_ids) for r in answered} == {1, 6}
    assert all(len(r.logprobs[0].top) == 20 for r in answered if len(r.token_ids) == 1)
    assert probed.costs.probe_tokens == sum(r.computed_tokens for r in found if not isinstance(r, Exception))
    assert plain.costs.probe_tokens == 0 and probed.costs.thinking_tokens == plain.costs.thinking_tokens
    assert held == 0, "nothing is held when the response has ended"
