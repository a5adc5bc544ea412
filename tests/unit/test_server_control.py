"""What bodies say about early stopping, and what reaches the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest
from server_stand_in import ScriptedEngine, chat, events, serving

from thinkfold.engine.samples import Question
from thinkfold.errors import ParameterError
from thinkfold.server.state import ServerOptions
from thinkfold.server.tools import Tool, Toolbox
from thinkfold.types import (
    BestOfParams,
    CompletionOutput,
    ControlParams,
    Costs,
    Decision,
    EarlyStop,
    FinishReason,
    RequestOutput,
    SearchParams,
    ThinkingPolicy,
    VoteParams,
    VoteState,
)

KNOBS = {"entropy": 0.1, "consistency": "3/4"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
APIS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}]}),
    ("/v1/completions", {"prompt": "w"}),
    ("/v1/responses", {"input": "q"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 50}),
]


async def control_of(path: str, body: dict) -> ControlParams | None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        response = await client.post(path, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    return engine.calls[0].control


@pytest.mark.parametrize(("path", "body"), APIS)
async def test_every_api_takes_the_knobs(path, body):
    wanted = ControlParams(early_stop=EarlyStop(entropy=0.1, consistency=(3, 4)))
    assert await control_of(path, body) is None
    assert await control_of(path, {**body, "early_stop": KNOBS}) == wanted
    assert await control_of(path, {**body, "early_stop_threshold": KNOBS}) == wanted
    inside = {"control": {"preset": "balanced", "early_stop": KNOBS}}
    assert await control_of(path, {**body, "thinkfold": inside}) == replace(wanted, preset="balanced")


def test_a_request_with_tools_is_guarded():
    tool, params = Tool.model_validate(TOOL), ControlParams("balanced")
    assert Toolbox([tool], None, None).control(params) == ControlParams("balanced", task="tools")
    assert Toolbox([tool], None, None).control(None) == ControlParams(task="tools")
    assert Toolbox(None, None, None).control(params) == Toolbox([tool], "none", None).control(params) == params


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"early_stop": {"entropy": -1}}, "early_stop.entropy"),
        ({"early_stop": {"patience": 3}}, "early_stop.patience"),
        ({"early_stop": {"entropy": 0.1}, "early_stop_threshold": {"entropy": 0.2}}, "early_stop_threshold"),
        ({"early_stop": {"entropy": 0.1}, "thinkfold": {"control": {"early_stop": {"entropy": 1}}}}, "early_stop"),
        ({"thinkfold": {"control": {"preset": "bold"}}}, "thinkfold.control.preset"),
        ({"thinkfold": {"control": {"shadow": True}}}, "thinkfold.control.shadow"),
        ({"thinkfold": {"control": {"task": "poetry"}}}, "thinkfold.control.task"),
    ],
)
async def test_bad_wishes_are_refused_by_name(more, field):
    async with serving(ScriptedEngine()) as client:
        response = await chat(client, **more)
    assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text


async def test_decisions_are_metrics(monkeypatch):
    stats = replace(ScriptedEngine().stats(), decisions={("margin", "stopped"): 3}, rules_off=(("margin", "code"),))
    monkeypatch.setattr(ScriptedEngine, "stats", lambda self: stats)
    async with serving(ScriptedEngine()) as client:
        text = (await client.get("/metrics")).text
    assert 'thinkfold_stop_decisions_total{outcome="stopped",rule="margin"} 3.0' in text
    assert 'thinkfold_stop_rules_off{rule="margin",task="code"} 1.0' in text


@dataclass(slots=True)
class Decider(ScriptedEngine):
    """Tells one state of a vote, then its end."""

    asked: list[tuple[Question, Decision]] = field(default_factory=list)

    async def decide(self, question: Question, how: Decision) -> AsyncGenerator[RequestOutput, None]:
        question.check(how.field)
        self.asked.append((question, how))
        policy = ThinkingPolicy(True, None, "default")
        state = VoteState(n=how.samples, started=4, running=4, finished=0, cancelled=0, abstained=0)
        yield RequestOutput(question.request_id, [CompletionOutput(0)], policy, Costs(), outcome=state)
        done = replace(state, running=0, finished=3, cancelled=1, answer="7", rule="beta", sample=2)
        shown = CompletionOutput(
            0, "w", "7", num_output_tokens=3, num_thinking_tokens=1, finish_reason=FinishReason.STOP
        )
        costs = Costs(prompt_tokens=5, thinking_tokens=30, answer_tokens=12, discarded_tokens=9)
        yield RequestOutput(question.request_id, [shown], policy, costs, True, outcome=done)


async def test_a_vote_shows_the_winner_the_result_and_what_all_samples_cost():
    engine = Decider()
    async with serving(engine) as client:
        body = (await chat(client, vote={"n": 6, "mode": "all"}, early_stop=KNOBS)).json()
    ((question, how),) = engine.asked
    assert how == VoteParams(6, "all") and question.control is not None and question.request_id == body["id"]
    assert body["choices"][0]["message"]["content"] == "7" and len(body["choices"]) == 1
    vote = body["thinkfold"]["vote"]
    assert (vote["answer"], vote["rule"], vote["finished"], vote["cancelled"]) == ("7", "beta", 3, 1)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 42)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 30
    assert usage["thinkfold"]["tokens"]["discarded"] == 9


async def test_a_stream_tells_the_state_of_its_vote_if_asked_to():
    async with serving(Decider()) as client:
        told = await chat(client, vote=True, stream=True, thinkfold={"events": True})
        silent = await chat(client, vote=True, stream=True)
    assert told.text.count("event: thinkfold.vote") == 2
    chunks = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: {")]
    states = [chunk["thinkfold"]["vote"] for chunk in chunks if "vote" in chunk.get("thinkfold", {})]
    assert [state["rule"] for state in states] == [None, "beta", "beta"], "two events, and the end of the stream"
    assert "event:" not in silent.text and events(silent)[-1]["thinkfold"]["vote"]["answer"] == "7"


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])
async def test_every_api_votes_and_counts_all_samples(path, body, inside):
    wish, engine = {"n": 6}, Decider()
    more = {"thinkfold": {"vote": wish}} if inside else {"vote": wish}
    async with serving(engine) as client:
        whole = (await client.post(path, json={**body, **more})).json()
        stream = await client.post(
            path, json={**body, **more, "stream": True, "thinkfold": {"events": True, "vote": wish}}
        )
        wrong = await client.post(path, json={**body, **more, "thinkfold": {"vote": {"n": 1}}, "vote": None})
    ((question, how), _) = engine.asked
    assert how == VoteParams(6) and question.request_id == whole["id"]
    assert whole["thinkfold"]["vote"]["answer"] == "7" and '"7"' in json.dumps(whole)
    usage = whole["usage"]
    assert usage.get("output_tokens", usage.get("completion_tokens")) == 42
    details = usage.get("output_tokens_details", usage.get("completion_tokens_details"))
    assert details.get("reasoning_tokens", details.get("thinking_tokens")) == 30
    assert stream.text.count("event: thinkfold.vote") == 2 and '"rule":"beta"' in stream.text
    assert wrong.status_code == 400 and "thinkfold.vote.n: " in wrong.text


async def test_a_vote_of_completions_is_over_one_prompt():
    async with serving(Decider()) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b"], "vote": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


async def test_a_vote_is_so_many_choices_of_its_session():
    session = {"id": "s", "total_budget": 8000}
    async with serving(Decider()) as client:
        body = (await chat(client, vote={"n": 8}, thinkfold={"session": session})).json()
    assert body["thinkfold"]["session"]["call_budget"] == 8000 // 2 // 8


CONVERSATIONS = [api for api in APIS if api[0] != "/v1/completions"]


@pytest.mark.parametrize(("path", "body"), CONVERSATIONS, ids=[path for path, _ in CONVERSATIONS])
async def test_every_api_of_conversations_takes_best_of_and_searches(path, body):
    engine = Decider()
    best = {"n": 6, "verifier": "judge", "timeout_s": 2, "reads": "thinking"}
    wrong = {"best_of.n": {"best_of": {"n": 1, "verifier": "judge"}}, "best_of.verifier": {"best_of": {"n": 4}}}
    wrong |= {"search.kind": {"search": {"kind": "deep"}}, "best_of": {"vote": True, "best_of": best}}
    async with serving(engine) as client:
        whole = (await client.post(path, json={**body, "best_of": best})).json()
        walked = (
            await client.post(path, json={**body, "search": {"kind": "tree", "width": 3, "score": "probe"}})
        ).json()
        refused = {field: await client.post(path, json={**body, **more}) for field, more in wrong.items()}
    (judged, best_of), (asked, search) = engine.asked
    assert best_of == BestOfParams("judge", 6, 2, "thinking") and judged.text == asked.text == "q"
    assert search == SearchParams("tree", 3, score="probe")
    assert (judged.request_id, asked.request_id) == (whole["id"], walked["id"]) and '"7"' in json.dumps(whole)
    assert all(r.status_code == 400 and field in r.text for field, r in refused.items())


async def test_completions_have_neither():
    async with serving(Decider()) as client:
        for more in ({"best_of": {"n": 4, "verifier": "judge"}}, {"search": {}}):
            response = await client.post("/v1/completions", json={"prompt": "a", **more})
            assert response.status_code == 400 and next(iter(more)) in response.text


async def test_the_answer_of_a_vote_is_kept_for_such_a_vote_only():
    engine = Decider()
    async with serving(engine) as client:
        wish = {"thinkfold": {"step_cache": {"step": "Add"}}}
        first = (await chat(client, vote=True, **wish)).json()
        again = (await chat(client, vote=True, **wish)).json()
        await chat(client, vote={"n": 6}, **wish)
        await chat(client, **wish)
    assert len(engine.asked) == 2 and len(engine.calls) == 1
    assert again["usage"]["thinkfold"]["step_cache"]["hit"] and again["usage"]["completion_tokens"] == 0
    assert again["thinkfold"]["vote"] == first["thinkfold"]["vote"] and again["thinkfold"]["vote"]["answer"] == "7"


async def test_a_servers_early_stopping_is_for_samples_and_not_for_the_steps_of_a_search():
    engine, stops = Decider(), ControlParams("balanced")
    async with serving(engine, ServerOptions(control=stops)) as client:
        sampled = (await chat(client, best_of={"verifier": "judge"})).json()
        searched = (await chat(client, search={})).json()
    assert [question.control for question, _ in engine.asked] == [stops, None]
    assert sampled["thinkfold"]["policy"]["control"]["preset"] == "balanced"
    assert searched["thinkfold"]["policy"]["control"] is None


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"vote": True, "thinkfold": {"vote": {"n": 3}}}, "thinkfold.vote"),
        ({"thinkfold": {"vote": {"size": 3}}}, "thinkfold.vote.size"),
        ({"best_of": {"n": 4}}, "best_of.verifier"),
        ({"best_of": {"n": 1, "verifier": "judge"}}, "best_of.n"),
        ({"best_of": {"verifier": "http://127.0.0.1:1/judge"}}, "best_of.verifier"),
        ({"best_of": {"verifier": "//127.0.0.1:1/judge"}}, "best_of.verifier"),
        ({"best_of": {"verifier": {"url": "http://127.0.0.1:1"}}}, "best_of.verifier"),
        ({"best_of": {"verifier": "judge"}, "temperature": 0}, "temperature"),
        ({"best_of": {"verifier": "judge"}, "vote": True}, "best_of"),
        ({"vote": {"n": 1}}, "vote.n"),
        ({"vote": {"size": 3}}, "vote.size"),
        ({"vote": True, "n": 2}, "n"),
        ({"vote": True, "temperature": 0}, "temperature"),
    ],
)
async def test_what_makes_no_vote_is_refused(more, field):
    async with serving(Decider()) as client:
        response = await chat(client, **more)
    assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text


@pytest.mark.parametrize("how", [VoteParams(), BestOfParams("judge"), SearchParams()])
def test_calls_are_not_compared(how):
    toolbox = Toolbox([Tool.model_validate(TOOL)], None, None)
    assert toolbox.decision(None) is None and Toolbox(None, None, None).decision(how) == how
    with pytest.raises(ParameterError, match=f"{how.field}: goes without tools"):
        toolbox.decision(how)


async def test_engines_that_ask_one_sample_refuse_votes():
    async with serving(ScriptedEngine()) as client:
        response = await chat(client, vote=True)
    assert response.status_code == 400 and response.json()["error"]["param"] == "vote"
