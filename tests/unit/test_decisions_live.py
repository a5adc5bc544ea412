"""Votes over live samples: waves, cancelled siblings, probes of all, one bill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decision_script import ASKED, Looks, Replies, boxed, last_call
from scripted import OPEN_PROMPT, ids, loop, make_engine

from thinkfold.config import EngineConfig
from thinkfold.control.embedding import unit
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.messages import ModelInfo
from thinkfold.engine.samples import Question, Samples
from thinkfold.engine.voting import run_vote
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.types import (
    Limits,
    Prices,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingParams,
    VoteParams,
    VoteState,
)


async def vote(engine: Replies, params: VoteParams, looks: Looks | None = None, **more) -> list[RequestOutput]:
    looks = looks or Looks()
    options = {"in_flight": False, **more}
    return [output async for output in run_vote(Samples(engine, ASKED), params, looks, last_call(), **options)]


async def test_a_settled_vote_starts_no_second_wave():
    engine = Replies(boxed(7, 7, 7, 7, 1, 1, 1, 1))
    *states, last = await vote(engine, VoteParams(8))
    assert last.finished and last.request_id == "q" and last.outputs[0].text == "It is \\boxed{7}."
    found = last.outcome
    assert isinstance(found, VoteState)
    assert (found.answer, found.rule, found.started, found.finished, found.running) == ("7", "beta", 4, 4, 0)
    assert [(c.answer, c.count) for c in found.classes] == [("7", 4)] and found.share == 1.0
    assert len(engine.seeds) == 1
    assert all(state.outcome and state.outcome.rule is None and not state.finished for state in states)
    first = states[0].outcome
    assert isinstance(first, VoteState) and (first.started, first.running, first.finished) == (4, 4, 0)
    counts = [state.outcome.finished for state in states if isinstance(state.outcome, VoteState)]
    assert counts == sorted(counts) and len(set(counts)) > 1, "its state is told as it forms"


async def test_an_open_vote_goes_on_in_waves_with_other_seeds_and_pays_the_prompt_once():
    engine = Replies(boxed(7, 1, 7, 1, 7, 7, 7, 7))
    last = (await vote(engine, VoteParams(8)))[-1]
    assert isinstance(last.outcome, VoteState) and last.outcome.answer == "7" and last.outcome.started == 8
    assert engine.seeds == [1, 5]
    assert (last.costs.prompt_tokens, last.costs.cached_tokens, last.costs.computed_prompt_tokens) == (3, 1, 3)
    assert last.costs.answer_tokens == 8 and last.costs.thinking_tokens == 8 * 5


class Seeing:
    """An embedder to which every text means the same."""

    def embed(self, texts):
        return [unit((1.0, 0.0)) for _ in texts]


@pytest.mark.parametrize(("embedder", "classes"), [(Seeing(), [4]), (None, [2, 2])])
async def test_prose_is_compared_by_the_engines_embedder(embedder, classes):
    texts = ["It is red.", "The colour of a rose.", "It is red.", "The colour of a rose."]
    last = (await vote(Replies(texts), VoteParams(4, mode="all", stop="exact"), Looks(embedder=embedder)))[-1]
    assert isinstance(last.outcome, VoteState)
    assert [one.count for one in last.outcome.classes] == classes


async def test_waves_share_one_deadline_and_one_cost():
    """A clock of the test's own: the second wave starts 3 s after the first, which has cost 2."""
    now = [0.0]

    class Timed(Replies):
        services: list[Service] = []  # noqa: RUF012

        async def generate(self, *args, **more):
            self.services.append(more["service"])
            async for output in super().generate(*args, **more):
                output.limits = Limits(9, deadline_ms=more["service"].deadline_ms, max_cost=more["service"].max_cost)
                yield output
            now[0] += 3.0

    engine = Timed(boxed(7, 1, 7, 1, 7, 7, 7, 7))
    service = Service(deadline_ms=5000, max_cost=10.0, prices=Prices(gpu_second=0.0, prompt=1e6))
    samples = Samples(engine, replace(ASKED, service=service), lambda: now[0])
    last = [one async for one in run_vote(samples, VoteParams(8), Looks(), last_call(), in_flight=False)][-1]
    assert [(each.deadline_ms, each.max_cost) for each in engine.services] == [(5000, 10.0), (2000, 8.0)]
    assert (last.limits.deadline_ms, last.limits.max_cost) == (5000, 10.0), "as the client knows them"


async def test_siblings_that_cannot_change_the_winner_are_cancelled():
    engine = Replies(boxed(7, 7, 7, 1, 1), [2, 2, 2, 900, 900])
    last = (await vote(engine, VoteParams(5, mode="all", stop="exact")))[-1]
    assert isinstance(last.outcome, VoteState)
    assert (last.outcome.rule, last.outcome.cancelled) == ("lossless", 2)
    assert engine.cancelled == [("q-s0", 3), ("q-s0", 4)]


async def test_a_vote_settled_in_flight_lets_one_sample_write():
    engine = Replies(boxed(7, 7, 7, 7), [5000] * 4)
    looks = Looks()
    last = (await vote(engine, VoteParams(4), looks, in_flight=True, tick_tokens=20))[-1]
    assert isinstance(last.outcome, VoteState)
    assert (last.outcome.answer, last.outcome.rule, last.outcome.finished) == ("7", "in_flight", 1)
    assert len(engine.ended) == 1 and len(engine.cancelled) == 3 and looks.asked == 8
    assert last.outputs[0].text and last.outputs[0].index == 0


async def test_without_ticks_nothing_is_probed():
    looks = Looks()
    await vote(Replies(boxed(7, 7, 7, 7), [200] * 4), VoteParams(4), looks, in_flight=False, tick_tokens=20)
    assert looks.asked == 0


async def test_samples_without_an_answer_fail_and_an_engine_that_dies_is_told():
    last = (await vote(Replies(["", "", *boxed(3, 3)]), VoteParams(4)))[-1]
    assert isinstance(last.outcome, VoteState) and (last.outcome.answer, last.outcome.finished) == ("3", 2)
    with pytest.raises(EngineDeadError):
        await vote(Replies(boxed(1, 1), fails=EngineDeadError("gone")), VoteParams(2))


@pytest.mark.parametrize(("sampling", "field"), [({"n": 2}, "n"), ({"temperature": 0.0}, "temperature")])
def test_what_makes_no_vote_is_refused(sampling, field):
    with pytest.raises(ParameterError) as refused:
        Question((1,), SamplingParams(**sampling)).check("vote")
    assert refused.value.field == field


async def test_samples_fork_off_one_prefill():
    made = []

    def build(config):
        engine = make_engine(max_num_seqs=8)
        engine.runner.scripts["any"] = (loop(answer="B"), len(ids(OPEN_PROMPT)))
        made.append(engine)
        return engine.core, ModelInfo("pebble", "qwen3", 1600, 1536, 400, 4, 100, 1600, "qwen3", True, True)

    engine = await AsyncEngine.start(EngineConfig(own_process=False), build=build)
    try:
        prompt = tuple(ids(OPEN_PROMPT))
        question = Question(prompt, SamplingParams(max_tokens=60), ThinkingParams(thinking_token_budget=9))
        last = [output async for output in engine.decide(question, VoteParams(8))][-1]
    finally:
        await engine.stop()
    assert isinstance(last.outcome, VoteState) and last.outcome.answer == "B" and last.outcome.started == 4
    assert last.costs.computed_prompt_tokens <= len(prompt) + 4, "the prompt is computed once"
    assert last.costs.thinking_tokens == 4 * 9
