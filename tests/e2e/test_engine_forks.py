"""Handles and going back through the whole engine, folds included (random weights, fp32, CPU)."""

from __future__ import annotations

import asyncio

import pytest
from test_engine_folds import NO_LIMIT, THINK, config

from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import PositionError
from thinkfold.fold.planner import FoldPlanner
from thinkfold.scheduler.folding import FoldDesk
from thinkfold.types import FOLD_PROFILES, FoldProfile, RequestOutput, SamplingParams, Until

TOKENS = 200


@pytest.fixture(scope="module", autouse=True)
def short_segments():
    """Numbers that fold a response of this length several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FOLD_PROFILES, "fine", FoldProfile(48, 16, 12, 16, 8))
        yield


def stream(engine: AsyncEngine, request_id: str, **more):
    prompt = engine.prompts.encode_chat([{"role": "user", "content": "What is 12 * 3?"}])
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
    return engine.generate(prompt, sampling, NO_LIMIT, request_id=request_id, **more)


async def merged(outputs) -> RequestOutput:
    total = None
    async for output in outputs:
        if total is None:
            total = output
        else:
            total.merge(output)
    assert total is not None and total.error is None
    return total


def drawn(output: RequestOutput):
    (one,) = output.outputs
    return one.token_ids, [p.logprob for p in one.logprobs]


@pytest.mark.parametrize("changes", [{"fold_policy": "off"}, {}], ids=["raw", "folds"])
@pytest.mark.parametrize("depth", [0, 1])
async def test_what_goes_on_from_a_handle_is_what_the_branch_itself_goes_on_with(changes, depth):
    engine = await AsyncEngine.start(config(**changes, pipeline_depth=depth))
    try:
        plain = await merged(stream(engine, "plain"))
        outputs = stream(engine, "main")
        seen = 0
        while seen < 40:
            seen = (await anext(outputs)).outputs[0].num_output_tokens
        await engine.pause("main")
        handle = await engine.fork("main")
        await engine.resume("main")
        rest = await merged(outputs)
        child = await merged(engine.extend(handle.id))
        again = await merged(engine.extend(handle.id))
        other = await merged(engine.extend(handle.id, seed=99))
        await engine.drop(handle.id)
        stats = engine.stats()
    finally:
        await engine.stop()
    ids, logprobs = drawn(plain)
    assert drawn(child)[0] == ids[handle.position :] or changes == {}
    if changes:
        assert drawn(child)[1] == logprobs[-len(drawn(child)[1]) :]
        assert rest.outputs[0].token_ids == ids[-len(rest.outputs[0].token_ids) :]
    else:
        assert child.costs.folds > 0 and handle.holds_folding_before == handle.position
        folded = [f.start for f in child.outputs[0].folds]
        assert all(start >= handle.position for start in folded), "a live handle holds folding back"
    assert drawn(again) == drawn(child) != drawn(other)
    assert child.costs.computed_prompt_tokens == 0 and child.costs.cached_tokens >= handle.position
    assert stats.handles == 0


async def test_positions_in_folded_thinking_are_refused_and_borders_are_good():
    engine = await AsyncEngine.start(config())
    try:
        outputs = stream(engine, "main")
        total = await anext(outputs)
        while not (len(total.outputs[0].folds) >= 2 and total.outputs[0].num_output_tokens > 90):
            total.merge(await anext(outputs))
        await engine.pause("main")
        folds = sorted(total.outputs[0].folds, key=lambda f: f.start)
        first = folds[0]
        with pytest.raises(PositionError) as caught:
            await engine.fork("main", at=first.start + 3)
        assert set(caught.value.nearest) == {first.start, first.end}
        kept = [await engine.fork("main", at=at) for at in (0, first.start, first.end)]
        parts = [await merged(engine.extend(h.id, Until(max_tokens=12))) for h in kept]
        assert [p.outputs[0].num_output_tokens for p in parts] == [h.position + 12 for h in kept]
        assert parts[0].outputs[0].token_ids == total.outputs[0].token_ids[:12], "before any fold it is the same"
        assert parts[1].outputs[0].token_ids == total.outputs[0].token_ids[first.start :][:12]
        assert await engine.rollback("main", first.start) == first.start
        await engine.resume("main")
        total.merge(await merged(outputs))
    finally:
        await engine.stop()
    assert total.outputs[0].num_output_tokens == TOKENS == len(total.outputs[0].token_ids)
    assert engine.stats().pages_by_class["thinking"] > 0, "the handles live on"


async def test_a_foreign_handle_is_not_there():
    engine = await AsyncEngine.start(config(fold_policy="off"))
    try:
        outputs = stream(engine, "main", namespace=("salt=a",))
        await anext(outputs)
        handle = await engine.fork("main")
        for namespace in ((), ("salt=b",)):
            with pytest.raises(Exception, match="no handle"):
                await merged(engine.extend(handle.id, namespace=namespace))
        part = await merged(engine.extend(handle.id, Until(max_tokens=2), namespace=("salt=a",)))
        assert part.outputs[0].handle is not None
        await asyncio.wait_for(engine.cancel("main"), 10)
        await outputs.aclose()
    finally:
        await engine.stop()


async def test_branches_of_one_handle_fold_what_they_share_once(monkeypatch):
    """The same tokens as when each writes its own summary; the selector does not look at queries, which differ."""

    async def go_on() -> tuple[list[list[int]], int, int]:
        engine = await AsyncEngine.start(config(fold_selector="streaming", fold_policy="eager"))
        try:
            written = []
            settle = FoldDesk._adopt

            def watched(*args, **more):
                written.append(settle(*args, **more))
                return written[-1]

            monkeypatch.setattr(FoldDesk, "_adopt", watched)
            begun = await merged(stream(engine, "r", until=Until(max_tokens=52)))
            total = await merged(engine.extend(begun.outputs[0].handle.id, n=3, temperature=1.0))
            return [o.token_ids for o in total.outputs], total.costs.folds, sum(written)
        finally:
            monkeypatch.setattr(FoldDesk, "_adopt", settle)
            await engine.stop()

    monkeypatch.setattr(FoldPlanner, "hold", lambda *_: None)  # as if the handle were dropped before the first step
    tokens, folds, adopted = await go_on()
    monkeypatch.setattr(FoldDesk, "_known", lambda *_: None)
    assert await go_on() == (tokens, folds, 0)
    assert adopted == 2 and len({tuple(t) for t in tokens}) == 3
