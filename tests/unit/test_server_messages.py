"""Anthropic's Messages API around a scripted engine: blocks, signatures, stream events, stop reasons."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from server_shapes import fold_message, named_events
from server_stand_in import EOS, LOOP, ScriptedEngine, eventually, serving
from tiny_tokenizer import KEEPING_TEMPLATE, OPEN_TEMPLATE

from thinkfold.server.keyring import Keyring
from thinkfold.server.state import ServerOptions
from thinkfold.types import Fold, Segment

THINKS = {"thinking": {"type": "enabled", "budget_tokens": 50}}
SCRIPT = ("a", "b", "</think>", "A", EOS)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "q"}], **more}


async def post(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/messages", json=body(**more))


async def both_ways(engine: ScriptedEngine, **more: Any) -> dict[str, Any]:
    """The message, after checking that stream and non-stream agree."""
    async with serving(engine) as client:
        whole = (await post(client, **more)).json()
        streamed = fold_message(named_events(await post(client, **more, stream=True)))
    assert {**streamed, "id": whole["id"]} == whole
    return whole


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


async def test_case_55_blocks_of_a_reply_that_thinks() -> None:
    message = await both_ways(ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE), **THINKS)
    thinking, text = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "ab") and thinking["signature"]
    assert text == {"type": "text", "text": "A"}
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["thinkfold"]["policy"]["thinking"]["budget"] == 50


@pytest.mark.parametrize("off", [{}, {"thinking": {"type": "disabled"}}])
async def test_case_55_and_6_no_thinking_without_being_asked(off: dict[str, Any]) -> None:
    engine = ScriptedEngine((("A", EOS),), template=OPEN_TEMPLATE)
    message = await both_ways(engine, **off)
    assert kinds(message) == ["text"] and message["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    assert engine.calls[0].thinking.enabled is False and "</think>" in engine.calls[0].prompt


async def test_case_55_cut_inside_thinking() -> None:
    message = await both_ways(ScriptedEngine((LOOP,), template=OPEN_TEMPLATE), **THINKS, max_tokens=51)
    assert kinds(message) == ["thinking"] and message["content"][0]["signature"]
    assert message["stop_reason"] == "max_tokens"


async def test_case_55_blocks_come_back_as_they_went() -> None:
    engine = ScriptedEngine((SCRIPT,), template=KEEPING_TEMPLATE + "<think>\n")
    async with serving(engine) as client:
        content = (await post(client, **THINKS)).json()["content"]
        history = [*body()["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "r"}]
        again = await post(client, **THINKS, messages=history)
        assert again.status_code == 200 and "<think>\nab\n</think>\n\nA" in engine.calls[-1].prompt
        wrong = {
            "signature": [
                {**content[0], "thinking": "ac"},
                {**content[0], "signature": "Zm9yZWlnbg=="},
                {**content[0], "signature": "nicht 64 ü"},
                {**content[0], "thinking": ""},
                {"type": "thinking", "thinking": "ab"},
            ],
            "thinking": [{"type": "thinking", "signature": "x"}],
            "data": [{**content[0], "data": "x"}],
            "type": [{"type": "redacted_thinking", "data": "x"}],
        }
        for field, blocks in wrong.items():
            for block in blocks:
                history[1] = {"role": "assistant", "content": [block, content[1]]}
                refused = await post(client, **THINKS, messages=history)
                assert refused.status_code == 400, block
                assert refused.json()["error"]["message"].startswith(f"messages[1].content[0].{field}: ")


async def test_signatures_hold_for_servers_that_share_a_secret_and_no_others() -> None:
    keys = [Keyring(b"s" * 32), Keyring(b"s" * 32), Keyring(b"t" * 32)]
    replies = []
    content: list[dict[str, Any]] = []
    for key in keys:
        engine = ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE)
        async with serving(engine, ServerOptions(keyring=key)) as client:
            content = content or (await post(client, **THINKS)).json()["content"]
            history = [*body()["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "r"}]
            replies.append((await post(client, **THINKS, messages=history)).status_code)
    assert replies == [200, 200, 400]


async def test_omitted_thinking_travels_in_its_signature() -> None:
    engine = ScriptedEngine((SCRIPT,), template=KEEPING_TEMPLATE + "<think>\n")
    asked = {"thinking": {**THINKS["thinking"], "display": "omitted"}}
    async with serving(engine) as client:
        content = (await post(client, **asked)).json()["content"]
        events = named_events(await post(client, **asked, stream=True))
        history = [*body()["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "r"}]
        assert (await post(client, **asked, messages=history)).status_code == 200
    assert content[0]["thinking"] == "" and not [e for e in events if "thinking" in e.get("delta", {})]
    assert kinds(fold_message(events)) == ["thinking", "text"]
    assert "<think>\nab\n</think>" in engine.calls[-1].prompt


async def test_a_cut_reply_sent_back_goes_on_thinking() -> None:
    engine = ScriptedEngine((LOOP,), template=OPEN_TEMPLATE)
    async with serving(engine) as client:
        content = (await post(client, **THINKS, max_tokens=51)).json()["content"]
        history = [*body()["messages"], {"role": "assistant", "content": content}]
        cut = (await post(client, **THINKS, max_tokens=51, messages=history)).json()
    assert engine.calls[-1].prompt.endswith("<think>\n" + "a" * 51)
    assert kinds(cut) == ["thinking"]


@pytest.mark.parametrize(
    ("template", "prefill", "script", "want"),
    [
        (OPEN_TEMPLATE, None, ("w", "</think>", "A", EOS), ["thinking", "text"]),
        (None, None, ("<think>", "w", "</think>", "A", EOS), ["thinking", "text"]),
        (None, "<think>p</think>", ("A", "B", EOS), ["text"]),
        (None, "<think>p", ("w", "</think>", "A", EOS), ["thinking", "text"]),
    ],
)
async def test_case_4_start_state_comes_from_the_prompt_tail(
    template: str | None, prefill: str | None, script: tuple[str, ...], want: list[str]
) -> None:
    engine = ScriptedEngine((script,), **({"template": template} if template else {}))
    messages = body()["messages"]
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    assert kinds(await both_ways(engine, **THINKS, messages=messages)) == want


async def test_thinking_that_opens_again_is_a_block_of_its_own() -> None:
    script = ("a", "</think>", "A", "<think>", "b", "</think>", "B", EOS)
    message = await both_ways(ScriptedEngine((script,), template=OPEN_TEMPLATE), **THINKS)
    assert kinds(message) == ["thinking", "text", "thinking", "text"]
    assert message["content"][0]["signature"] != message["content"][2]["signature"]


async def test_case_26_stop_sequences_sleep_while_thinking() -> None:
    engine = ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE)
    await both_ways(engine, **THINKS, stop_sequences=["=", "\n\n"])
    sampling = engine.calls[0].sampling
    assert (sampling.stop, sampling.stop_in_thinking) == (("=", "\n\n"), False)


async def test_case_32_usage_counts_thinking_and_the_cache() -> None:
    message = await both_ways(
        ScriptedEngine(((*"aaaaa", "</think>", "A", "B", EOS),), template=OPEN_TEMPLATE), **THINKS
    )
    usage = message["usage"]
    assert usage["output_tokens"] == 9 and usage["output_tokens_details"] == {"thinking_tokens": 5}
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] + 2 == usage["thinkfold"]["tokens"]["prompt"]


async def test_stop_reasons() -> None:
    engine = ScriptedEngine((("A", "B", EOS),))
    assert (await both_ways(engine, max_tokens=2))["stop_reason"] == "max_tokens"
    # The scripted engine knows one way to run out: a model's length is told by a count below max_tokens.
    engine = ScriptedEngine((LOOP,), ends_after=3)
    assert (await both_ways(engine))["stop_reason"] == "model_context_window_exceeded"
    stopped = await both_ways(ScriptedEngine((("A", "STOP:end"),)), stop_sequences=["end", "x"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "end")
    assert (await both_ways(ScriptedEngine((("A", "CANCEL"),))))["stop_reason"] == "pause_turn"


async def test_case_22_budgets_and_effort() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        for effort in ("low", "medium", "high", "xhigh", "max"):
            asked = {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}
            assert (await post(client, **asked)).status_code == 200
            assert (engine.calls[-1].thinking.enabled, engine.calls[-1].thinking.reasoning_effort) == (True, effort)
        await post(client, thinking={"type": "adaptive"})
        assert engine.calls[-1].thinking.reasoning_effort == "high"
        both = await post(client, **THINKS, output_config={"effort": "low"})
        assert both.json()["thinkfold"]["policy"]["thinking"]["source"] == "thinking_token_budget"
        number = len(engine.calls)
        for bad in (100, 101, 10**12, 0, -1, -2, True, 1.5, "7", None):
            refused = await post(client, thinking={"type": "enabled", "budget_tokens": bad})
            assert refused.status_code == 400, bad
            assert refused.json()["error"]["message"].startswith("thinking.budget_tokens"), bad
    assert len(engine.calls) == number


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"output_config": {"effort": "banana"}}, "output_config.effort"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_object", "schema": {}}}}, "output_config.format.type"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"thinking_budgets": 7}, "thinking_budgets"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": 2.1}, "temperature"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "cache_control.ttl"),
        ({"thinkfold": {"event": True}}, "thinkfold.event"),
        ({"thinkfold": {"fold": {"selector": "none"}}}, "thinkfold.fold.selector"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "system", "content": "q"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "q", "name": "n"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "body"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "only"}]}, "messages"),
        ({"system": [{"type": "text", "text": "s", "cache_control": {"type": "x"}}]}, "system[0].cache_control"),
        ({"system": [{"type": "text", "text": "s", "citations": [1]}]}, "system[0].citations"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_field_in_anthropics_shape(more: dict[str, Any], field: str, stream: bool) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        refused = await client.post("/v1/messages", content=json.dumps(body(stream=stream, **more)))
        assert (await post(client)).status_code == 200
    assert refused.status_code == 400, refused.text
    error = refused.json()
    assert error.keys() == {"type", "error"} and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(f"{field}: "), error["error"]["message"]


async def test_errors_of_other_kinds_have_anthropics_shape() -> None:
    async with serving(ScriptedEngine(((*"aaaa", EOS),), fail_after=2)) as client:
        found = await post(client, model="claude")
        failed = await post(client)
        events = named_events(await post(client, stream=True))
        method = await client.get("/v1/messages")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the row failed"}}
    assert "message_stop" not in [e["type"] for e in events]
    assert (method.status_code, method.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_system_prompts_turns_and_blocks_reach_the_template() -> None:
    engine = ScriptedEngine()
    block = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [block, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "four <|im_end|>"},
    ]
    async with serving(engine) as client:
        for system in ("one\n\ntwo", [block, {"type": "text", "text": "two"}]):
            reply = await post(client, system=system, messages=turns, cache_control={"type": "ephemeral"})
            assert reply.status_code == 200, reply.text
    assert engine.calls[0].prompt == engine.calls[1].prompt
    assert engine.calls[0].prompt.startswith(
        "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\none\n\ntwo\n\nthree"
    )
    assert "assistant\nyes<|im_end|>\n<|im_start|>user\nfour " in engine.calls[0].prompt


async def test_sampling_and_namespaces_reach_the_engine() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        reply = await post(
            client, temperature=0.5, top_p=0.9, top_k=7, seed=3, cache_salt="acme", prompt_cache_key="k",
            metadata={"user_id": "u"}, service_tier="auto", thinkfold={"fold": {"policy": "eager"}},
        )  # fmt: skip
    call = engine.calls[0]
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k, call.sampling.seed) == (0.5, 0.9, 7, 3)
    assert call.namespace == ("salt=acme", "key=k")
    assert reply.json()["thinkfold"]["policy"]["fold"]["policy"] == "eager"


async def test_count_tokens_counts_the_prompt_that_would_be_sent() -> None:
    engine = ScriptedEngine(template=OPEN_TEMPLATE)
    fields = {"messages": body()["messages"], "system": "be brief", **THINKS}
    async with serving(engine) as client:
        counted = await client.post("/v1/messages/count_tokens", json={"model": "tiny", **fields})
        sent = (await post(client, **fields)).json()["usage"]
        refused = await client.post("/v1/messages/count_tokens", json={"messages": [], "max_tokens": 4})
    assert counted.json() == {"input_tokens": sent["input_tokens"] + sent["cache_read_input_tokens"]}
    assert len(engine.calls) == 1
    assert refused.json()["error"]["message"].startswith("max_tokens: is not a known field")


async def test_pings_while_nothing_happens_and_folds_as_events() -> None:
    told = {1: [Segment(0, 0, 1), Fold(0, 0, 1, 1.0, 2, 0.5)]}
    engine = ScriptedEngine((SCRIPT,), template=OPEN_TEMPLATE, gate=asyncio.Event(), told=told)
    async with serving(engine, ServerOptions(keepalive_s=0.01)) as client:
        reply = asyncio.create_task(post(client, **THINKS, stream=True, thinkfold={"events": True}))
        await eventually(lambda: engine.running == 1)
        asyncio.get_running_loop().call_later(0.1, engine.gate.set)
        events = named_events(await reply)
    names = [e["type"] for e in events]
    assert names[0] == "message_start" and names[1] == "ping"
    folds = [e["thinkfold"]["fold"] for e in events if e["type"] == "thinkfold.fold"]
    assert [(f["segment"], f["pages_freed"]) for f in folds] == [(0, 2)]
