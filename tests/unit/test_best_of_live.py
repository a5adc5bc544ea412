"""Best of N over live samples: scores as they come, misses, one bill, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from decision_script import ASKED, Looks, Replies, boxed, last_call

from thinkfold.engine.decisions import Decisions
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.types import BestOfParams, BestOfState, Judged, RequestOutput


def run(engine: Replies, how: BestOfParams) -> Any:
    return Decisions(engine, Looks(), last_call()).run(ASKED, how)  # type: ignore[arg-type]


async def best_of(engine: Replies, how: BestOfParams) -> list[RequestOutput]:
    return [output async for output in run(engine, how)]


def state(output: RequestOutput) -> BestOfState:
    assert isinstance(output.outcome, BestOfState)
    return output.outcome


def by_answer(**scores: float) -> Any:
    """A verifier that knows what each answer is worth."""

    def judge(question: str, judged: Sequence[Judged]) -> list[float]:
        assert question == "What is it?"
        return [next(s for name, s in scores.items() if f"{{{name[1:]}}}" in one.answer) for one in judged]

    return judge


async def test_the_best_class_wins_and_the_state_is_told_as_it_forms():
    engine = Replies(boxed(7, 1, 7, 2, 1, 7, 2, 1), [3, 9, 6, 9, 5, 4, 8, 2])
    *states, last = await best_of(engine, BestOfParams(by_answer(_7=0.3, _1=0.5, _2=0.6)))
    assert last.finished and last.request_id == "q" and last.outputs[0].text == "It is \\boxed{1}."
    found = state(last)
    assert (found.answer, found.rule, found.started, found.finished, found.running) == ("1", "all", 8, 8, 0)
    assert [(one.sample, one.answer, one.score) for one in found.scores][:2] == [(0, "7", 0.3), (1, "1", 0.5)]
    assert found.sample == 7, "three of .5 beat two of .6 and three of .3; the shortest of them is shown"
    assert (found.verifier, found.reads, found.timeout_s, found.misses) == ("judge", "answer", 5.0, 0)
    counts = [len(state(each).scores) for each in states]
    assert counts == sorted(counts) and len(set(counts)) > 2 and all(state(each).rule is None for each in states)
    assert engine.seeds == [1, 5], "waves of four, each with seeds of its own"
    assert last.costs.prompt_tokens == 3 and last.costs.answer_tokens == 8


async def test_two_good_scores_end_it_and_cancel_the_siblings():
    engine = Replies(boxed(7, 7, 1, 1), [2, 3, 10**6, 10**6])
    last = (await best_of(engine, BestOfParams(by_answer(_7=0.96, _1=0.1), n=4)))[-1]
    found = state(last)
    assert (found.answer, found.rule, found.finished, found.cancelled) == ("7", "good", 2, 2)
    assert engine.cancelled == [("q-s0", 2), ("q-s0", 3)]


async def test_a_late_score_is_a_miss_with_its_reason():
    gate = threading.Event()

    def judge(question: str, judged: Sequence[Judged]) -> list[float]:
        if "{2}" in judged[0].answer:
            gate.wait(10)
        return [0.4]

    engine = Replies(boxed(1, 2, 1, 3))
    found = state((await best_of(engine, BestOfParams(judge, n=4, timeout_s=0.2)))[-1])
    gate.set()
    assert (found.answer, found.misses, found.rule) == ("1", 1, "all")
    assert found.scores[1].score is None and found.scores[1].error == "no score within 0.2 s"


async def test_a_verifier_that_never_scores_leaves_the_vote():
    def broken(question: str, judged: Sequence[Judged]) -> list[float]:
        return [float("nan")]

    found = state((await best_of(Replies(boxed(1, 2, 2, 3)), BestOfParams(broken, n=4)))[-1])
    assert (found.answer, found.misses, found.rule) == ("2", 4, "unscored")
    assert {one.error for one in found.scores} == {"nan is no finite number"}


@pytest.mark.parametrize(("reads", "seen"), [("answer", ""), ("thinking", "w" * 5)])
async def test_thinking_is_read_only_if_asked_for(reads, seen):
    read: list[Judged] = []

    def judge(question: str, judged: Sequence[Judged]) -> list[float]:
        read.extend(judged)
        return [0.5]

    await best_of(Replies(boxed(1, 1)), BestOfParams(judge, n=2, reads=reads))
    assert [one.thinking for one in read] == [seen] * 2 and all(one.answer for one in read)


async def test_a_sample_far_behind_is_cancelled_at_a_step():
    steps: list[str] = []

    def judge(question: str, judged: Sequence[Judged]) -> list[float]:
        (one,) = judged
        if one.answer:
            return [0.8]
        steps.append(one.thinking)
        return [0.4]

    engine = Replies(boxed(7, 1), [35, 10**6])
    found = state((await best_of(engine, BestOfParams(judge, n=2, reads="steps")))[-1])
    assert (found.answer, found.cancelled, found.finished, found.rule) == ("7", 1, 1, "all")
    assert engine.cancelled == [("q-s0", 1)]
    assert min(map(len, steps)) >= 30, "the third paragraph is the first that is asked about"


async def test_samples_that_fail_and_an_engine_that_dies():
    found = state((await best_of(Replies(["", "", *boxed(3, 3)]), BestOfParams(by_answer(_3=0.5), n=4)))[-1])
    assert (found.answer, found.finished, len(found.scores)) == ("3", 2, 2)
    nobody = (await best_of(Replies(["", ""]), BestOfParams(by_answer(), n=2)))[-1]
    assert state(nobody).sample is None and state(nobody).rule == "all"
    with pytest.raises(EngineDeadError):
        await best_of(Replies(boxed(1, 1), fails=EngineDeadError("gone")), BestOfParams(by_answer(_1=1), n=2))


async def test_who_stops_listening_ends_samples_and_questions():
    gate = threading.Event()

    def judge(question: str, judged: Sequence[Judged]) -> list[float]:
        gate.wait(10)
        return [0.5]

    engine = Replies(boxed(1, 1), [3, 10**6])
    outputs = run(engine, BestOfParams(judge, n=2))
    async for output in outputs:
        if state(output).finished == 1:
            break
    before = len(asyncio.all_tasks())
    await outputs.aclose()
    assert engine.running == 0 and len(asyncio.all_tasks()) < before
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    gate.set()


def test_unknown_verifiers_and_greedy_samples_are_refused_at_once():
    with pytest.raises(ParameterError, match=r"best_of\.verifier: there is no 'nobody'; this engine knows: none"):
        run(Replies([]), BestOfParams("nobody"))
