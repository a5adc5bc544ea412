"""OpenAI's Responses API around a scripted engine: items, events, what is stored and what is sealed."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from typing import Any

import httpx
import pytest
from server_shapes import fold_response, named_events, sealed_away
from server_stand_in import EOS, LOOP, ScriptedEngine, serving
from tiny_tokenizer import KEEPING_TEMPLATE, OPEN_TEMPLATE

from thinkfold.server.keyring import Keyring
from thinkfold.server.state import ServerOptions
from thinkfold.types import Fold, Segment

SCRIPT = ("a", "b", "</think>", "A", "B", EOS)
SEALED = {"include": ["reasoning.encrypted_content"]}
UNLIKE = ("id", "created_at", "completed_at")  # between two replies to the same request


async def post(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={"model": "tiny", "input": "q", **more})


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    items = [{**item, "id": "", **sealed_away(item)} for item in response["output"]]
    return {**response, "output": items, **dict.fromkeys(UNLIKE)}


async def both_ways(engine: ScriptedEngine, **more: Any) -> dict[str, Any]:
    """The response, after checking that stream, non-stream and store agree."""
    async with serving(engine) as client:
        whole = (await post(client, **more)).json()
        streamed = fold_response(named_events(await post(client, **more, stream=True)))
        for response in (whole, streamed):
            kept = await client.get(f"/v1/responses/{response['id']}")
            assert kept.json() == response if response["store"] else kept.status_code == 404
    assert comparable(streamed) == comparable(whole)
    return whole


def texts(response: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(item["type"], item["content"][0]["text"], item["status"]) for item in response["output"]]


async def test_a_reply_is_a_reasoning_item_and_a_message() -> None:
    response = await both_ways(ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE), instructions="be brief")
    assert texts(response) == [("reasoning", "ab", "completed"), ("message", "AB", "completed")]
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert response["instructions"] == "be brief" and response["thinkfold"]["policy"]["thinking"]["enabled"]
    assert response["usage"]["output_tokens"] == 6
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


async def test_case_56_cut_inside_thinking() -> None:
    response = await both_ways(ScriptedEngine((LOOP,), template=OPEN_TEMPLATE), max_output_tokens=8)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert texts(response) == [("reasoning", "a" * 8, "incomplete")]
    assert response["usage"]["output_tokens"] == 8 and response["thinking_end_reason"] == "unclosed"


async def test_case_56_cut_inside_the_answer() -> None:
    response = await both_ways(ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE), max_output_tokens=4)
    assert response["status"] == "incomplete"
    assert texts(response) == [("reasoning", "ab", "completed"), ("message", "A", "incomplete")]


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"reasoning": {"effort": "none"}}])
async def test_case_6_thinking_off_leaves_no_reasoning_item(off: dict[str, Any]) -> None:
    response = await both_ways(ScriptedEngine((("A", EOS),), template=OPEN_TEMPLATE), **off)
    assert texts(response) == [("message", "A", "completed")]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("template", "prefill", "script", "want"),
    [
        (OPEN_TEMPLATE, None, ("w", "</think>", "A", EOS), ["reasoning", "message"]),
        (None, None, ("<think>", "w", "</think>", "A", EOS), ["reasoning", "message"]),
        (None, "<think>p</think>", ("A", "B", EOS), ["message"]),
        (None, "<think>p", ("w", "</think>", "A", EOS), ["reasoning", "message"]),
    ],
)
async def test_case_4_start_state_comes_from_the_prompt_tail(
    template: str | None, prefill: str | None, script: tuple[str, ...], want: list[str]
) -> None:
    engine = ScriptedEngine((script,), **({"template": template} if template else {}))
    items = [{"role": "user", "content": "q"}]
    if prefill is not None:
        items.append({"role": "assistant", "content": prefill})
    assert [item["type"] for item in (await both_ways(engine, input=items))["output"]] == want


async def test_thinking_that_opens_again_is_an_item_of_its_own() -> None:
    script = ("a", "</think>", "A", "<think>", "b", "</think>", "B", EOS)
    response = await both_ways(
        ScriptedEngine((script,), template=OPEN_TEMPLATE), include=["message.output_text.logprobs"]
    )
    assert [text for _, text, _ in texts(response)] == ["a", "A", "b", "B"]
    tokens = [[p["token"] for p in item["content"][0].get("logprobs", [])] for item in response["output"]]
    assert tokens == [[], ["A"], [], ["B"]]


async def test_encrypted_reasoning_goes_back_and_nothing_else_does() -> None:
    engine = ScriptedEngine((SCRIPT,), template=KEEPING_TEMPLATE + "<think>\n")
    async with serving(engine) as client:
        plain = (await post(client)).json()["output"]
        output = (await post(client, **SEALED)).json()["output"]
        unstored = (await post(client, store=False)).json()["output"]
        assert plain[0]["encrypted_content"] is None and unstored[0]["encrypted_content"]
        sealed = output[0]["encrypted_content"]
        assert b"ab" not in urlsafe_b64decode(sealed)
        other = "B" if sealed[20] == "A" else "A"
        first, last = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
        for reasoning in ({**output[0], "content": []}, output[0], plain[0]):
            reply = await post(client, input=[first, reasoning, output[1], last])
            assert reply.status_code == 200, reply.text
            assert "<think>\nab\n</think>\n\nAB" in engine.calls[-1].prompt
        number = len(engine.calls)
        for field, wrong in (
            ("encrypted_content", {**output[0], "encrypted_content": sealed[:20] + other + sealed[21:]}),
            ("encrypted_content", {**output[0], "encrypted_content": Keyring().seal("ab", ("responses", ""))}),
            ("encrypted_content", {**output[0], "encrypted_content": 3}),
            ("encrypted_content", {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}),
            ("content", {**output[0], "content": [{"type": "reasoning_text", "text": "ac"}]}),
        ):
            refused = await post(client, input=[first, wrong, output[1], last])
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"input[1].{field}"), wrong
    assert len(engine.calls) == number


async def test_a_response_goes_on_from_a_stored_one() -> None:
    engine = ScriptedEngine((SCRIPT,), template=KEEPING_TEMPLATE + "<think>\n")
    async with serving(engine) as client:
        first = (await post(client, input="one", instructions="be brief")).json()
        events = named_events(await post(client, input="two", previous_response_id=first["id"], stream=True))
        second = fold_response(events)
        third = (await post(client, input="three", previous_response_id=second["id"], instructions="shout")).json()
        assert third["previous_response_id"] == second["id"]
        prompt = engine.calls[-1].prompt
        assert prompt.startswith("<|im_start|>system\nshout<|im_end|>") and "be brief" not in prompt
        assert [prompt.count(word) for word in ("one", "two", "three", "<think>\nab\n</think>\n\nAB")] == [1, 1, 1, 2]
        assert "be brief" not in engine.calls[1].prompt

        gone = await client.delete(f"/v1/responses/{first['id']}")
        assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
        for again in (
            await client.get(f"/v1/responses/{first['id']}"),
            await client.delete(f"/v1/responses/{first['id']}"),
        ):
            assert (again.status_code, again.json()["error"]["code"]) == (404, "response_not_found")
        refused = await post(client, previous_response_id=first["id"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert (await post(client, previous_response_id=second["id"])).status_code == 200


async def test_a_cut_response_goes_on_from_its_items_or_with_a_new_question() -> None:
    engine = ScriptedEngine((LOOP,), template=OPEN_TEMPLATE)
    async with serving(engine) as client:
        cut = (await post(client, max_output_tokens=3)).json()
        items = [{"role": "user", "content": "q"}, *cut["output"]]
        longer = (await post(client, max_output_tokens=2, input=items)).json()
        assert engine.calls[-1].prompt.endswith("<think>\naaa") and longer["status"] == "incomplete"
        assert (
            await post(client, max_output_tokens=2, input="r", previous_response_id=longer["id"])
        ).status_code == 200
        assert "user\nr<|im_end|>" in engine.calls[-1].prompt


async def test_what_is_not_stored_cannot_be_found() -> None:
    engine = ScriptedEngine((SCRIPT,))
    assert (await both_ways(engine, store=False))["store"] is False
    async with serving(engine, ServerOptions(response_store_bytes=0)) as client:
        response = (await post(client)).json()
        assert response["store"] is False
        assert (await client.get(f"/v1/responses/{response['id']}")).status_code == 404
        assert (await post(client, store=True)).json()["error"]["param"] == "store"
    async with serving(engine, ServerOptions(response_store_bytes=3000)) as client:
        assert (await post(client, input="long " * 400)).json()["store"] is False


class AsTenant:
    """Stands for a check of API keys: it says whose a request is."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        tenant = dict(scope.get("headers", ())).get(b"x-tenant", b"").decode()
        await self.app({**scope, "state": {**scope.get("state", {}), "tenant": tenant}}, receive, send)


class Controlled(ScriptedEngine):
    """Takes the order to pause, and remembers whose it was."""

    owners: list[tuple[str, tuple[str, ...]]]

    def check_owner(self, request_id: str, namespace: tuple[str, ...]) -> None:
        self.owners = [(request_id, namespace)]

    async def pause(self, *_: Any) -> None: ...

    resume = cancel = end_thinking = set_budget = inject = fork = extend = drop = pause


async def test_a_tenant_neither_sees_nor_opens_what_is_anothers() -> None:
    engine = ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE)

    async with serving(engine, wrap=AsTenant) as client:
        mine, theirs = {"x-tenant": "me"}, {"x-tenant": "you"}
        body = {"input": "q", **SEALED}
        response = (await client.post("/v1/responses", json=body, headers=mine)).json()
        path = f"/v1/responses/{response['id']}"
        assert (await client.get(path, headers=mine)).status_code == 200
        assert (await client.get(path, headers=theirs)).status_code == 404
        assert (await client.delete(path, headers=theirs)).status_code == 404
        chained = {"input": "r", "previous_response_id": response["id"]}
        assert (await client.post("/v1/responses", json=chained, headers=theirs)).status_code == 400
        assert (await client.post("/v1/responses", json=chained, headers=mine)).status_code == 200
        items = {"input": [{"role": "user", "content": "q"}, *response["output"], {"role": "user", "content": "r"}]}
        foreign = await client.post("/v1/responses", json=items, headers=theirs)
        assert foreign.json()["error"]["param"] == "input[1].encrypted_content"
        await client.post("/v1/chat/completions", json={"messages": items["input"][:1]}, headers=theirs)
    assert [call.namespace for call in engine.calls] == [("tenant=me",), ("tenant=me",), ("tenant=you",)]


async def test_orders_are_given_in_the_tenants_name() -> None:
    engine = Controlled()
    async with serving(engine, wrap=AsTenant) as client:
        order = {"action": "pause", "cache_salt": "acme"}
        path = "/v1/thinkfold/responses/resp_x/control"
        assert (await client.post(path, json=order, headers={"x-tenant": "me"})).status_code == 200
    assert engine.owners == [("resp_x", ("tenant=me", "salt=acme"))]


async def test_logprobs_stand_with_the_answer() -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    engine = ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE)
    response = await both_ways(engine, **asked)
    shown = response["output"][1]["content"][0]["logprobs"]
    assert [(p["token"], p["bytes"], p["logprob"], len(p["top_logprobs"])) for p in shown] == [
        ("A", [65], -0.5, 1),
        ("B", [66], -0.5, 1),
    ]
    async with serving(engine) as client:
        events = named_events(await post(client, **asked, stream=True))
    deltas = [p for e in events if e["type"] == "response.output_text.delta" for p in e["logprobs"]]
    assert deltas == shown and response["top_logprobs"] == 1


async def test_fields_reach_the_engine_and_are_echoed() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        reply = await post(
            client, temperature=0.5, top_p=0.9, top_k=7, seed=3, max_output_tokens=9, cache_salt="acme",
            prompt_cache_key="k", metadata={"a": "b"}, user="u", safety_identifier="s", tools=[], tool_choice="none",
            parallel_tool_calls=False, truncation="disabled", text={"format": {"type": "text"}},
            reasoning={"effort": "low", "summary": "auto"}, thinkfold={"fold": {"policy": "eager"}},
        )  # fmt: skip
    assert reply.status_code == 200, reply.text
    call, body = engine.calls[0], reply.json()
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k, call.sampling.seed) == (0.5, 0.9, 7, 3)
    assert (call.sampling.max_tokens, call.thinking.reasoning_effort) == (9, "low")
    assert call.namespace == ("salt=acme", "key=k")
    assert body["reasoning"] == {"effort": "low", "summary": None} and body["tool_choice"] == "none"
    assert (body["temperature"], body["max_output_tokens"], body["metadata"]) == (0.5, 9, {"a": "b"})
    assert body["thinkfold"]["policy"]["fold"]["policy"] == "eager"


async def test_case_54_effort_and_case_22_budgets() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
            policy = (await post(client, reasoning={"effort": effort})).json()["thinkfold"]["policy"]["thinking"]
            assert policy["source"] == "reasoning_effort"
        beaten = (await post(client, reasoning={"effort": "none"}, thinking_token_budget=7)).json()
        assert beaten["thinkfold"]["policy"]["thinking"]["budget"] == 7
        for bad in ("banana", 3, {}):
            error = (await post(client, reasoning={"effort": bad})).json()["error"]
            assert error["param"] == "reasoning.effort" and "minimal" in error["message"]
        for bad in (-2, True, 1.5, "7"):
            assert (await post(client, thinking_token_budget=bad)).json()["error"]["param"] == "thinking_token_budget"
        twice = await post(client, reasoning={"effort": "low"}, reasoning_effort="high")
        assert twice.json()["error"]["message"].startswith("reasoning.effort: disagrees with reasoning_effort")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"thinkfold": {"fold": {"selector": "none"}}}, "thinkfold.fold.selector"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "q"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "q", "phase": "commentary"}]}, "input[0].phase"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "assistant", "content": "only"}]}, "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusals_name_the_field(more: dict[str, Any], field: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        for stream in (False, True):
            refused = await post(client, stream=stream, **more)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == field, refused.text
        asked = await client.get("/v1/responses/resp_x?stream=true")
        assert asked.json()["error"]["param"] == "stream"
        assert (await post(client)).status_code == 200


async def test_a_request_that_fails_later() -> None:
    async with serving(ScriptedEngine(((*"aaaa", EOS),), fail_after=2)) as client:
        whole = await post(client)
        events = named_events(await post(client, stream=True))
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "request_failed"
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "the row failed"}
        assert (await client.get(f"/v1/responses/{last['response']['id']}")).status_code == 404


async def test_a_cancelled_response_keeps_what_it_may() -> None:
    kept = await both_ways(ScriptedEngine((("a", "</think>", "A", "CANCEL"),), template=OPEN_TEMPLATE))
    assert (kept["status"], kept["incomplete_details"]) == ("cancelled", None)
    assert texts(kept) == [("reasoning", "a", "completed"), ("message", "A", "incomplete")]
    engine = ScriptedEngine((("a", "</think>", "A", "DISCARD"),), template=OPEN_TEMPLATE)
    async with serving(engine) as client:
        whole = (await post(client)).json()
        events = named_events(await post(client, stream=True))
    assert [e["item"]["status"] for e in events if e["type"] == "response.output_item.done"] == [
        "completed",
        "incomplete",
    ]
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["output"], response["usage"]["output_tokens"]) == ("cancelled", [], 0)


async def test_folds_are_events_with_numbers() -> None:
    told = {1: [Segment(0, 0, 1), Fold(0, 0, 1, 1.0, 2, 0.5)]}
    engine = ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE, told=told)
    async with serving(engine) as client:
        events = named_events(await post(client, stream=True, thinkfold={"events": True}))
    assert fold_response(events)["status"] == "completed"
    assert [e["thinkfold"]["fold"]["pages_freed"] for e in events if e["type"] == "thinkfold.fold"] == [2]
