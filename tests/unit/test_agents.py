"""Agent sessions share one budget over calls; answers of steps that come again are kept, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from server_stand_in import EOS, LOOP, ScriptedEngine, chat_body, events, eventually, join
from test_server_access import RIGHT, WRONG, bearer, guarded, key

from thinkfold.engine.sessions import FLOOR, SessionStore
from thinkfold.errors import NotFoundError, ParameterError, SessionsFullError
from thinkfold.server.access.gate import Access
from thinkfold.server.access.keys import KeyTable
from thinkfold.server.agents.step_cache import Answer, StepCache, key_of, normalised
from thinkfold.server.serving import Serving
from thinkfold.server.state import ServerOptions
from thinkfold.types import (
    Clamp,
    CompletionOutput,
    Costs,
    FinishReason,
    Limits,
    RequestOutput,
    Service,
    SessionParams,
    ThinkingEndReason,
    ThinkingPolicy,
)
from thinkfold.types.fold import FoldPolicy

CHAT = "/v1/chat/completions"
POLICY = ThinkingPolicy(True, 9, "default")


def spend(tokens: int) -> RequestOutput:
    return RequestOutput("r", [], POLICY, Costs(thinking_tokens=tokens))


def store(most: int = 10, ttl_s: float = 100.0) -> tuple[SessionStore, list[float]]:
    now = [0.0]
    return SessionStore(most, ttl_s, lambda: now[0]), now


def test_each_call_gets_half_of_what_is_left_and_never_less_than_the_floor() -> None:
    sessions, _ = store()
    budgets = []
    for _ in range(8):
        call = sessions.open("t", SessionParams("s", 8000), 1)
        budgets.append(call.budget)
        call.note(0, spend(call.budget))
        call.close()
        call.close()
    assert budgets == [4000, 2000, 1000, 500, FLOOR, FLOOR, FLOOR, FLOOR]
    shown = sessions.show("t", "s")
    assert (shown.spent, shown.remaining, shown.calls) == (7500 + 4 * FLOOR, 0, 8)


def test_what_a_call_does_not_think_is_free_again() -> None:
    sessions, _ = store()
    for _ in range(5):
        call = sessions.open("t", SessionParams("s", 8000), 1)
        assert call.budget == 4000
        call.close()


async def test_a_call_follows_an_engine_to_its_end_or_to_where_its_reader_leaves() -> None:
    sessions, _ = store()

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        for tokens in (100, 300, 700):
            yield spend(tokens)

    for ends, spent in ((False, 700), (True, 800)):
        call = sessions.open("t", SessionParams("s", 8000), 1)
        async with aclosing(call.follow(outputs())) as followed:
            async for _output in followed:
                assert call.session.running == 1
                if ends:
                    break
        state = sessions.show("t", "s")
        assert (state.spent, call.session.running, call.session.reserved) == (spent, 0, 0)


def test_calls_at_the_same_time_share_what_is_left() -> None:
    sessions, _ = store()
    first, second = sessions.open("t", SessionParams("s", 8000), 1), sessions.open("t", SessionParams("s", None), 2)
    assert (first.budget, second.budget) == (4000, 1000)
    first.note(0, spend(100))
    assert first.view() == {
        "id": "s",
        "object": "thinkfold.session",
        "total_budget": 8000,
        "spent": 100,
        "remaining": 7900,
        "call_budget": 4000,
    }
    first.close()
    second.close()
    assert sessions.show("t", "s").spent == 100


def test_sessions_are_their_tenants_and_end() -> None:
    sessions, now = store(most=2)
    sessions.open("t", SessionParams("s", 1000), 1).close()
    with pytest.raises(NotFoundError):
        sessions.show("other", "s")
    assert not sessions.delete("other", "s")
    with pytest.raises(ParameterError, match="session 's' begins with it"):
        sessions.open("other", SessionParams("s", None), 1)
    with pytest.raises(ParameterError, match="session 's' has 1000"):
        sessions.open("t", SessionParams("s", 2000), 1)
    now[0] = 99.0
    sessions.open("t", SessionParams("s", None), 1).close()
    now[0] = 198.0
    assert sessions.show("t", "s").expires_in_s == 1.0
    now[0] = 199.0
    with pytest.raises(NotFoundError):
        sessions.show("t", "s")


def test_the_store_is_bounded_and_keeps_who_runs() -> None:
    sessions, now = store(most=2)
    running = sessions.open("t", SessionParams("a", 1000), 1)
    sessions.open("t", SessionParams("b", 1000), 1).close()
    sessions.open("t", SessionParams("c", 1000), 1)
    assert len(sessions) == 2
    with pytest.raises(NotFoundError):
        sessions.show("t", "b")
    with pytest.raises(SessionsFullError):
        sessions.open("t", SessionParams("d", 1000), 1)
    now[0] = 1000.0
    assert sessions.show("t", "a").calls == 1, "a running call keeps its session"
    running.close()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Step 3: find  the mean.", "find the mean", True),
        ("2) find the\nmean", "- find the mean", True),
        ("find the mean of 3", "find the mean of 4", False),
        ("3.5 apples", "apples", False),
        ("Find x", "find X", False),
    ],
)
def test_steps_are_compared_without_what_writers_vary(a: str, b: str, same: bool) -> None:
    assert (normalised(a) == normalised(b)) is same


def test_keys_of_different_parts_differ() -> None:
    keys = {key_of("t", "ab", "c"), key_of("t", "a", "bc"), key_of("ta", "b", "c"), key_of("t", "ab"), key_of("", "ab")}
    assert len(keys) == 5


def test_the_cache_is_bounded_in_number_and_time() -> None:
    now = [0.0]
    cache = StepCache(2, 10.0, lambda: now[0])

    def answer(text: str) -> Answer:
        return Answer(text, None, POLICY, FoldPolicy(), Limits(), now[0])

    for name in "abc":
        cache.put(("t", name), answer(name))
    assert cache.get(("t", "a")) is None and len(cache) == 2
    assert (found := cache.get(("t", "b"))) is not None and found.text == "b"
    cache.put(("t", "d"), answer(""))
    assert cache.get(("t", "d")) is None
    now[0] = 10.0
    assert cache.get(("t", "b")) is None and len(cache) == 1


async def ask(client: httpx.AsyncClient, secret: str = RIGHT, body: dict[str, Any] | None = None, **more: Any) -> Any:
    wish = {**chat_body(max_tokens=50), **(body or {}), "thinkfold": more}
    return await client.post(CHAT, json=wish, headers=bearer(secret))


KEYS = KeyTable([key("a", RIGHT), key("b", WRONG)])


async def test_a_session_over_http() -> None:
    engine = ScriptedEngine()
    async with guarded(Access(KEYS), engine) as client:
        for _ in range(2):
            reply = await ask(client, session={"id": "job-1", "total_budget": 4000})
            session = reply.json()["thinkfold"]["session"]
            assert (session["id"], session["total_budget"], session["call_budget"]) == ("job-1", 4000, 2000)
        assert [call.service.session_budget for call in engine.calls] == [2000, 2000]
        shown = await client.get("/v1/thinkfold/sessions/job-1", headers=bearer(RIGHT))
        assert shown.json()["calls"] == 2 and shown.json()["object"] == "thinkfold.session"
        assert (await client.get("/v1/thinkfold/sessions/job-1", headers=bearer(WRONG))).status_code == 404
        assert (await client.delete("/v1/thinkfold/sessions/job-1", headers=bearer(WRONG))).status_code == 404
        gone = await client.delete("/v1/thinkfold/sessions/job-1", headers=bearer(RIGHT))
        assert gone.json()["deleted"] and gone.json()["removed"]["conversations"] == 1
        assert (await client.delete("/v1/thinkfold/sessions/job-1", headers=bearer(RIGHT))).status_code == 404
        for wrong in ({"id": "job-1"}, {"id": "a b", "total_budget": 5}, {"id": "x", "total_budget": 0}, {"id": 3}):
            refused = await ask(client, session=wrong)
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("thinkfold.session"), (
                wrong
            )


async def test_a_session_is_given_back_however_a_call_ends() -> None:
    engine = ScriptedEngine(refuse=ParameterError("temperature", "no"))
    async with guarded(Access(KEYS), engine) as client:
        for stream in (False, True):
            refused = await ask(client, body={"stream": stream}, session={"id": "s", "total_budget": 4000})
            assert refused.status_code == 400
        engine.refuse, engine.scripts, engine.gate = None, [LOOP], asyncio.Event()
        task = asyncio.create_task(ask(client, session={"id": "s"}))
        await eventually(lambda: engine.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.gate.set()
        await eventually(lambda: engine.running == 0)
        engine.scripts = [("w", "</think>", "A", EOS)]
        assert (await ask(client, session={"id": "s"})).json()["thinkfold"]["session"]["call_budget"] == 2000


async def test_a_step_is_answered_once_and_says_so() -> None:
    engine = ScriptedEngine(scripts=[("<think>", "w", "</think>", "A", EOS)])
    async with guarded(Access(KEYS), engine) as client:
        step = {"step": "1. Add the numbers."}
        first = (await ask(client, step_cache=step)).json()
        again = (await ask(client, step_cache={"step": "add the numbers"}, body={"messages": MORE})).json()
        assert first["usage"]["thinkfold"]["step_cache"] == {"hit": False}
        assert len(engine.calls) == 2, "case matters"
        hit = (await ask(client, step_cache={"step": "2) Add the  numbers"})).json()
        assert len(engine.calls) == 2 and hit["usage"]["thinkfold"]["step_cache"]["hit"] is True
        assert hit["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"] == "A"
        assert hit["choices"][0]["message"]["reasoning"] is None and hit["choices"][0]["finish_reason"] == "stop"
        assert hit["usage"]["completion_tokens"] == hit["usage"]["prompt_tokens"] == 0
        assert again["choices"][0]["message"]["content"] == "A"
        stream = await ask(client, step_cache=step, body={"stream": True, "stream_options": {"include_usage": True}})
        chunks = events(stream)
        assert join(chunks)[0].content == "A" and chunks[-1]["usage"]["thinkfold"]["step_cache"]["hit"] is True
        plain = (await ask(client)).json()
        assert len(engine.calls) == 3 and "step_cache" not in plain["usage"]["thinkfold"]


MORE = [{"role": "user", "content": "another conversation"}]


async def test_other_owners_parameters_and_a_bypass_compute_anew() -> None:
    engine = ScriptedEngine()
    async with guarded(Access(KEYS), engine) as client:
        step = {"step": "Add"}
        await ask(client, step_cache=step)
        others: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (WRONG, {}, {}),
            (RIGHT, {"temperature": 0.5}, {}),
            (RIGHT, {"cache_salt": "x"}, {}),
            (RIGHT, {"reasoning_effort": "low"}, {}),
            (RIGHT, {"early_stop": {"entropy": 0.1}}, {}),
            (RIGHT, {}, {"control": {"preset": "balanced"}}),
            (RIGHT, {}, {"fold": {"policy": "eager"}}),
            (RIGHT, {}, {"max_cost": 3}),
            (RIGHT, {}, {"step_cache": {"step": "Add", "bypass": True}}),
        ]
        for number, (secret, body, ours) in enumerate(others, start=2):
            reply = await ask(client, secret, body, **{"step_cache": step, **ours})
            assert len(engine.calls) == number and reply.json()["usage"]["thinkfold"]["step_cache"] == {"hit": False}
        await ask(client, step_cache=step)
        assert len(engine.calls) == 10, "what a bypass computed is kept"


async def test_unfinished_answers_are_not_kept_and_what_cannot_be_is_refused() -> None:
    engine = ScriptedEngine(scripts=[("w", "</think>", *("A" for _ in range(90)), EOS)])
    async with guarded(Access(KEYS), engine) as client:
        for _ in range(2):
            await ask(client, body={"max_tokens": 5}, step_cache={"step": "x"})
        assert len(engine.calls) == 2
        for body, step in (({"n": 2}, "x"), ({"logprobs": True}, "x"), ({}, " "), ({}, "y" * 20_000)):
            refused = await ask(client, body=body, step_cache={"step": step})
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("thinkfold.step_cache")
    async with guarded(Access(KEYS), engine, ServerOptions(step_cache_answers=0)) as client:
        assert (await ask(client, step_cache={"step": "x"})).status_code == 400


def test_an_answer_that_its_session_cut_short_is_not_kept() -> None:
    cache, clamp = StepCache(9, 10.0), Clamp("default_thinking_budget", 16_384, 256, "session")
    serving = Serving("", Service(), cache=cache, key=("t", "k"))
    last = CompletionOutput(0, finish_reason=FinishReason.STOP, thinking_end_reason=ThinkingEndReason.BUDGET)
    serving.keep("A", RequestOutput("r", [last], POLICY, Costs(), True, limits=Limits(clamped=(clamp,))))
    assert cache.get(("t", "k")) is None
    serving.keep("A", RequestOutput("r", [last], POLICY, Costs(), True))
    assert cache.get(("t", "k")) is not None


async def test_a_hit_spends_nothing_of_its_session() -> None:
    async with guarded(Access(KEYS)) as client:
        wish: dict[str, Any] = {"session": {"id": "s", "total_budget": 4000}, "step_cache": {"step": "x"}}
        await ask(client, **wish)
        assert (await ask(client, **wish)).json()["usage"]["thinkfold"]["step_cache"]["hit"] is True
        shown = (await client.get("/v1/thinkfold/sessions/s", headers=bearer(RIGHT))).json()
        assert (shown["calls"], shown["cached_answers"]) == (2, 1)


async def test_a_call_whose_session_is_deleted_meanwhile_leaves_nothing() -> None:
    engine = ScriptedEngine(scripts=[("w", "</think>", "A", EOS)])
    async with guarded(Access(KEYS), engine) as client:
        wish: dict[str, Any] = {"session": {"id": "s", "total_budget": 4000}, "step_cache": {"step": "x"}}
        for deleted in (False, True):
            engine.gate = asyncio.Event()
            body = {"input": "2 + 2", "thinkfold": wish}
            task = asyncio.create_task(client.post("/v1/responses", json=body, headers=bearer(RIGHT)))
            await eventually(lambda: engine.running == 1)
            if deleted:
                gone = await client.delete("/v1/thinkfold/sessions/s", headers=bearer(RIGHT))
                assert gone.json()["removed"] == {"responses": 0, "step_answers": 0, "conversations": 0}
            engine.gate.set()
            reply = (await task).json()
            assert reply["status"] == "completed" and reply["store"] is not deleted
            shown = await client.get(f"/v1/responses/{reply['id']}", headers=bearer(RIGHT))
            assert (shown.status_code == 200) is not deleted
            removed = await client.delete("/v1/thinkfold/sessions/s", headers=bearer(RIGHT))
            assert removed.status_code == (404 if deleted else 200), removed.text
        assert len(engine.calls) == 2
