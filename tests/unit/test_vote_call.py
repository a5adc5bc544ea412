"""The last rung of a vote's equality: one call says which of the answers that are still apart mean the same."""

from __future__ import annotations

import asyncio

import pytest
from decision_script import ASKED, POLICY, Looks, Replies, boxed, last_call
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BARE_PROMPT, EOS, ids, language, make_engine, script
from server_stand_in import eventually

from thinkfold.config import EngineConfig
from thinkfold.control.ballot import Tally, joined, question, tally
from thinkfold.control.equality import Equality, Rung
from thinkfold.control.judge import MAX_ANSWERS, MAX_CHARS, prompt_for, read_groups
from thinkfold.control.voting import CompareAnswers, Compared, Decide, Ticked, TraceFailed, TraceFinished, Voting
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.decisions import Decisions
from thinkfold.engine.last_call import MAX_REPLY_TOKENS, LastCall
from thinkfold.engine.messages import ModelInfo
from thinkfold.engine.samples import Samples
from thinkfold.engine.voting import run_vote
from thinkfold.errors import CapacityError, EngineDeadError, UnsupportedError
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import (
    CompletionOutput,
    Costs,
    FinishReason,
    RequestOutput,
    SamplingParams,
    ThinkingParams,
    VoteParams,
    VoteState,
)

CALL = VoteParams(5, mode="all", stop="exact", equality="call")
ROSES = ["It is red", "The colour of a rose", "Blue", "Blue", "The hue of roses"]
TOGETHER = "Group: 1\nGroup: 2, 3, 4"  # of those in the order that the vote asks in


def count(*answers: str | None) -> Tally:
    return tally(answers, [1.0] * len(answers), Equality())


def groups(found: Tally) -> list[tuple[tuple[int, ...], Rung]]:
    return [(one.members, one.rung) for one in found.classes]


def test_answers_are_numbered_and_the_call_is_bounded() -> None:
    assert "2. b c" in prompt_for(["a", "b\nc"])
    long = prompt_for(["so " * 500 + "it is 7"])
    assert "it is 7" in long and len(long) < len(prompt_for([""])) + MAX_CHARS + 10
    many = question(count(*(f"there are {n} of them" for n in range(20))))
    assert many is not None and f"\n{MAX_ANSWERS}. " in many and f"\n{MAX_ANSWERS + 1}. " not in many


@pytest.mark.parametrize("reply", ["Group: 1, 3\nGroup: 2", "**Group A:** 3, 1\n\n- group b: 2."])
def test_a_reply_is_groups_of_all_answers(reply: str) -> None:
    assert read_groups(reply, 3) == [[0, 2], [1]]


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "no idea",
        "Group: 1, 2, 9",
        "Group: 1\nGroup: 1, 2, 3",
        "Group: 0, 1, 2, 3",
        "Group: 1, 3",  # one is missing
        "Group: 1, 1, 2, 3",
        "Group: 1, 2, 3\nThey all mean the same.",
        "Group: 1 2 3",
        "Group: 1, 2, " + "3" * 5000,
    ],
)
def test_any_other_reply_decides_nothing(reply: str) -> None:
    assert read_groups(reply, 3) is None
    found = count("seven", "it is blue", "7")
    assert joined(found, reply) == found


def test_prose_joins_anything_but_two_exact_values_never_join() -> None:
    found = count("7", "seven of them", "8")
    assert groups(joined(found, "Group: 1, 2\nGroup: 3")) == [((0, 1), Rung.CALL), ((2,), Rung.CANONICAL)]
    assert joined(found, "Group: 1, 2\nGroup: 3").classes[0].answer == "7", "the exact value stands for its class"
    assert joined(count("seven of them", "7", "8"), "Group: 1, 2\nGroup: 3").classes[0].answer == "7"
    assert joined(found, "Group: 1, 2, 3") == found


def test_only_what_no_other_rung_decides_is_asked() -> None:
    assert question(count("7", "8", "x+1")) is None
    assert question(count("it is so", "It is so.", None)) is None, "one class"
    assert question(count("7", "it is so")) is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["7", "8", "seven", "it is red", "a rose", None]), max_size=9), st.data())
def test_a_call_joins_whole_classes(answers: list[str | None], data: st.DataObject) -> None:
    before = count(*answers)
    places = [data.draw(st.integers(0, 3)) for _ in before.classes]
    lines = {place: [str(n) for n, mine in enumerate(places, 1) if mine == place] for place in places}
    after = joined(before, "\n".join(f"Group: {', '.join(numbers)}" for numbers in lines.values()))
    members = sorted(member for one in after.classes for member in one.members)
    assert members == [index for index, answer in enumerate(answers) if answer is not None]
    for one in before.classes:
        assert sum(set(one.members) <= set(other.members) for other in after.classes) == 1
    assert all(one.representative in one.members and one.weight == one.count for one in after.classes)
    exact = [{answers[m] for m in one.members} & {"7", "8"} for one in after.classes]
    assert all(len(values) < 2 for values in exact) and after.abstained == before.abstained


def voted(params: VoteParams, *replies: str) -> tuple[Voting, list[object]]:
    voting = Voting(params, Equality(), in_flight=False)
    voting.start()
    actions: list[object] = []
    for trace, reply in enumerate(replies):
        actions += voting.observe(TraceFinished(trace, reply))
    return voting, actions


def test_the_call_turns_a_vote_that_nothing_else_could_join() -> None:
    voting, (asked,) = voted(CALL, *ROSES)
    assert isinstance(asked, CompareAnswers) and voting.result is None
    assert [line for line in asked.prompt.splitlines() if line[:1].isdigit()] == [
        "1. Blue",
        "2. It is red",
        "3. The colour of a rose",
        "4. The hue of roses",
    ]
    assert voting.observe(TraceFailed(0)) == [], "nothing but the reply goes on"
    (decided,) = voting.observe(Compared(TOGETHER))
    assert isinstance(decided, Decide) and decided.result is voting.result
    found = decided.result
    assert (found.answer, found.trace, found.rule, found.finished, found.share) == ("It is red", 0, "all", 5, 0.6)
    assert [(one.members, one.rung) for one in found.classes] == [((0, 1, 4), "call"), ((2, 3), "canonical")]
    assert voting.observe(Compared(TOGETHER)) == [], "once"


def test_without_a_reply_the_vote_is_what_it_was() -> None:
    voting, _ = voted(CALL, *ROSES)
    (decided,) = voting.observe(Compared("I would say that they are all nice."))
    _, (plain,) = voted(VoteParams(5, mode="all", stop="exact"), *ROSES)
    assert decided == plain


@pytest.mark.parametrize(
    ("weights", "asks"),
    [("none", False), ("confidence", True)],  # a weight may be anything
)
def test_a_winner_that_no_reply_could_change_needs_no_call(weights: str, asks: bool) -> None:
    params = VoteParams(5, mode="all", weights=weights, equality="call")  # pyright: ignore[reportArgumentType]
    voting, actions = voted(params, *boxed(7, 7), "It is red", *boxed(7))
    actions += voting.observe(TraceFailed(4))
    assert any(isinstance(action, CompareAnswers) for action in actions) == asks
    assert (voting.result is None) == asks


def test_a_winner_that_votes_in_flight_have_named_stands() -> None:
    voting = Voting(VoteParams(10, mode="all", equality="call"), Equality())
    voting.start()
    for trace, reply in enumerate([*boxed(7), "It is red", "The colour of a rose"]):
        assert voting.observe(TraceFinished(trace, reply)) == []
    probes = dict.fromkeys(range(3, 10), "7")
    assert voting.observe(Ticked(probes)) == []
    *_, decided = voting.observe(Ticked(probes))
    assert isinstance(decided, Decide) and (decided.result.rule, decided.result.answer) == ("in_flight", "7")


class Asked(Replies):
    """Beside its samples it says `says` to every other prompt, in two parts."""

    def __init__(self, texts, says: str, reason=FinishReason.STOP, error: Exception | None = None) -> None:
        super().__init__(texts)
        self.says, self.reason, self.error = says, reason, error
        self.calls: list[tuple[str, object, object]] = []

    async def generate(self, prompt, sampling, thinking=None, fold=None, *, request_id, **more):
        if not request_id.endswith("-aside"):
            async for output in super().generate(prompt, sampling, thinking, fold, request_id=request_id, **more):
                yield output
            return
        assert self.running == 0, "no sample runs any more"
        self.calls.append((language()[0].decode(prompt), sampling, thinking))
        if self.error is not None:
            raise self.error
        half = len(self.says) // 2
        costs = Costs(prompt_tokens=50, cached_tokens=10, computed_prompt_tokens=40, answer_tokens=8, device_s=2.0)
        yield RequestOutput(request_id, [CompletionOutput(0, text=self.says[:half])], POLICY, costs)
        last = CompletionOutput(0, text=self.says[half:], finish_reason=self.reason)
        yield RequestOutput(request_id, [last], POLICY, costs, finished=True)


async def last_of(engine: Asked, params: VoteParams = CALL) -> tuple[RequestOutput, VoteState]:
    outputs = run_vote(Samples(engine, ASKED), params, Looks(), last_call(), in_flight=False)
    last = [output async for output in outputs][-1]
    assert isinstance(last.outcome, VoteState) and last.finished and engine.running == 0
    return last, last.outcome


async def test_the_engine_asks_its_model_once_without_thinking_and_bills_the_vote():
    engine = Asked(ROSES, TOGETHER)
    last, found = await last_of(engine)
    assert [(one.answer, one.count, one.rung) for one in found.classes] == [
        ("It is red", 3, "call"),
        ("Blue", 2, "canonical"),
    ]
    assert (found.answer, found.sample, last.outputs[0].text) == ("It is red", 0, "It is red")
    ((prompt, sampling, thinking),) = engine.calls
    assert "1. Blue" in prompt and thinking.enabled is False
    assert (sampling.temperature, sampling.max_tokens, sampling.n) == (0.0, MAX_REPLY_TOKENS, 1)
    plain, _ = await last_of(Asked(ROSES, TOGETHER), VoteParams(5, mode="all", stop="exact"))
    assert last.costs.probe_tokens == 48 and plain.costs.probe_tokens == 0
    assert last.costs.device_s == 2.0 and plain.costs.device_s == 0.0
    for name in ("prompt_tokens", "cached_tokens", "computed_prompt_tokens", "answer_tokens", "thinking_tokens"):
        assert getattr(last.costs, name) == getattr(plain.costs, name), name


@pytest.mark.parametrize(
    ("says", "reason", "error"),
    [
        ("It is red, is it not?", FinishReason.STOP, None),
        (TOGETHER, FinishReason.LENGTH, None),
        (TOGETHER, FinishReason.STOP, CapacityError("max_tokens", "it does not fit")),
    ],
)
async def test_a_call_without_a_whole_reply_changes_nothing(says, reason, error):
    engine = Asked(ROSES, says, reason, error)
    _, found = await last_of(engine)
    assert len(engine.calls) == 1
    assert [(one.answer, one.count) for one in found.classes] == [
        ("Blue", 2),
        ("It is red", 1),
        ("The colour of a rose", 1),
        ("The hue of roses", 1),
    ]


async def test_an_engine_that_dies_in_the_call_is_told():
    with pytest.raises(EngineDeadError):
        await last_of(Asked(ROSES, "", error=EngineDeadError("gone")))


async def test_case_45_who_leaves_in_the_call_ends_it():
    begun, ended = asyncio.Event(), asyncio.Event()

    class Slow(Asked):
        async def generate(self, prompt, sampling, thinking=None, fold=None, *, request_id, **more):
            try:
                if request_id.endswith("-aside"):
                    begun.set()
                    await asyncio.Event().wait()
                async for output in super().generate(prompt, sampling, thinking, fold, request_id=request_id, **more):
                    yield output
            finally:
                if request_id.endswith("-aside"):
                    ended.set()

    vote = asyncio.create_task(last_of(Slow(ROSES, TOGETHER)))
    await begun.wait()
    vote.cancel()
    with pytest.raises(asyncio.CancelledError):
        await vote
    assert ended.is_set()


async def test_nobody_is_asked_unless_the_vote_says_so():
    for texts, params in ((ROSES, VoteParams(5)), (boxed(1, 2, 3, 2, 1), CALL)):
        engine = Asked(texts, TOGETHER)
        await last_of(engine, params)
        assert engine.calls == []


class Silent:
    """A family whose thinking nothing ends."""

    force_ids = ()


def test_a_model_that_cannot_be_asked_refuses():
    tokenizer, _, family = language()
    prompts = PromptRenderer(tokenizer, normalize=False)
    LastCall(prompts, family).check()
    if prompts.has_thinking_switch:
        LastCall(prompts, Silent()).check()  # type: ignore[arg-type]

    class Prompts:
        has_template, has_thinking_switch = True, False

    LastCall(Prompts(), None).check()  # type: ignore[arg-type]
    LastCall(Prompts(), family).check()  # type: ignore[arg-type]
    for call, why in (
        (LastCall(Prompts(), Silent()), "cannot be switched off"),  # type: ignore[arg-type]
        (LastCall(type("", (Prompts,), {"has_template": False})(), None), "no chat template"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedError, match=why) as refused:
            Decisions(Asked([], ""), Looks(), call).run(ASKED, CALL)  # type: ignore[arg-type]
        assert refused.value.field == "vote.equality"
        Decisions(Asked([], ""), Looks(), call).run(ASKED, VoteParams())  # type: ignore[arg-type]


async def test_what_the_engine_asks_by_itself_counts_as_a_probe_and_no_choice():
    def build(config):
        made = make_engine()
        made.runner.scripts["any"] = (script("A" + EOS), len(ids(BARE_PROMPT)))
        return made.core, ModelInfo("pebble", "qwen3", 1600, 1536, 400, 4, 100, 1600, "qwen3", True, True)

    engine = await AsyncEngine.start(EngineConfig(own_process=False), build=build)
    try:
        for aside in (False, True, True):
            sampling = SamplingParams(max_tokens=9, temperature=0.0)
            outputs = engine.generate(ids(BARE_PROMPT), sampling, ThinkingParams(enabled=False), aside=aside)
            costs = [output async for output in outputs][-1].costs
        await eventually(lambda: engine.stats().probe_tokens > 0)
        stats = engine.stats()
    finally:
        await engine.stop()
    assert stats.requests_by_reason == {"stop": 1}
    assert (stats.answer_tokens, stats.prompt_tokens) == (costs.answer_tokens, len(ids(BARE_PROMPT)))
    assert stats.probe_tokens == 2 * (costs.answer_tokens + costs.computed_prompt_tokens)
