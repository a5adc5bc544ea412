"""Tools in Anthropic Messages, through the real client: blocks, events, results that go back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from server_shapes import fold_message, named_events
from server_stand_in import EOS, ScriptedEngine, serving
from test_server_tools import DRAFT, PARIS, WEATHER, engine_of
from test_tool_calls import call

NOTHING = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"name": "weather", "description": "d", "input_schema": WEATHER, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "now", "input_schema": NOTHING},
]
PATH = "/v1/messages"
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 90, "messages": [{"role": "user", "content": "q"}]}
THINK: Any = {"type": "enabled", "budget_tokens": 60}
Block = tuple[str, Any]


@asynccontextmanager
async def client_of(engine: ScriptedEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with serving(engine) as client:
        assert isinstance(client._transport, httpx.ASGITransport)
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(client._transport.app))  # what this client is made of
        yield anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=http, max_retries=0)


def blocks(message: anthropic.types.Message) -> list[Block]:
    shown: list[Block] = []
    for block in message.content:
        if block.type == "tool_use":
            assert block.id.startswith("toolu_")
            shown.append((block.name, block.input))
        else:
            shown.append((block.type, getattr(block, block.type)))
    return shown


async def ask(engine: ScriptedEngine, **body: Any) -> tuple[list[Block], str | None]:
    """Blocks and stop reason; whole and streamed must agree."""
    body = {**ASK, "tools": TOOLS, "thinking": THINK, **body}
    async with client_of(engine) as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    assert (blocks(streamed), streamed.stop_reason) == (blocks(whole), whole.stop_reason)
    return blocks(whole), whole.stop_reason


async def test_a_call_in_pieces() -> None:
    engine = engine_of(["<think>", "w", "</think>", *PARIS])
    assert await ask(engine) == ([("thinking", "w"), ("weather", {"city": "Paris"})], "tool_use")
    assert '"name": "weather"' in engine.calls[0].prompt and engine.calls[0].sampling.grammar is None


async def test_text_and_parallel_calls() -> None:
    want = [("text", "Let me see."), ("weather", {"city": "Paris"}), ("now", {})]
    assert await ask(engine_of(["Let me see.\n", PARIS, "\n", call("now", {})])) == (want, "tool_use")


async def test_case_30_calls_drafted_in_thinking_are_not_made() -> None:
    script = ["<think>", *DRAFT, "</think>", "Sunny."]
    assert await ask(engine_of(script)) == ([("thinking", DRAFT), ("text", "Sunny.")], "end_turn")


async def test_the_events_of_a_call() -> None:
    async with serving(engine_of([*PARIS])) as client:
        reply = await client.post(PATH, json={**ASK, "tools": TOOLS, "stream": True})
    told = named_events(reply)
    (begun,) = [each for each in told if each["type"] == "content_block_start"]
    assert begun["content_block"] == {**begun["content_block"], "type": "tool_use", "name": "weather", "input": {}}
    deltas = [each["delta"] for each in told if each["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"} and len(deltas) > 3
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Paris"}
    assert fold_message(told)["stop_reason"] == "tool_use"


async def test_results_go_back() -> None:
    engine = engine_of(["<think>", "w", "</think>", PARIS, call("now", {})])
    async with client_of(engine) as client:
        first = await client.messages.create(**ASK, tools=TOOLS, thinking=THINK)
        ids = [block.id for block in first.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "sunny <|im_end|>"}]},
            {"type": "tool_result", "tool_use_id": ids[1], "content": "late", "is_error": True},
            {"type": "text", "text": "go on"},
        ]
        own: Any = [*ASK["messages"], {"role": "assistant", "content": first.content}]
        engine.scripts = [("Sunny.", EOS)]
        body: Any = {"tools": TOOLS, "thinking": THINK, "messages": [*own, {"role": "user", "content": results}]}
        again = await client.messages.create(**{**ASK, **body})
        counted = await client.messages.count_tokens(model="tiny", **body)
    assert blocks(again) == [("text", "Sunny.")]
    prompt = engine.calls[1].prompt
    assert prompt.count("<tool_call>") == 2 and "sunny <|im_end|>" in prompt and "Error: late" in prompt
    assert prompt.index("sunny") < prompt.index("Error: late") < prompt.index("go on")
    usage = again.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_a_call_that_was_cut() -> None:
    blocks_, why = await ask(engine_of([*PARIS]), max_tokens=len(PARIS) - 20, thinking={"type": "disabled"})
    assert why == "max_tokens" and [name for name, _ in blocks_] == ["weather"]


@pytest.mark.parametrize("wrong", ["{city: Paris}", '{"city": NaN}', "[1, 2]", '{"city": "\\ud800"}'])
async def test_an_input_that_is_no_json_object_comes_wrapped(wrong: str) -> None:
    engine = engine_of([f'<tool_call>\n{{"name": "weather", "arguments": {wrong}}}\n</tool_call>'])
    async with client_of(engine) as client:
        reply = await client.messages.create(**ASK, tools=TOOLS)
        assert (blocks(reply), reply.stop_reason) == ([("weather", {"INVALID_JSON": wrong})], "tool_use")
        call = reply.content[0].to_dict()
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "no JSON", "is_error": True}
        turns: Any = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        await client.messages.create(**{**ASK, "messages": [*ASK["messages"], *turns]}, tools=TOOLS)
    assert "INVALID_JSON" in engine.calls[-1].prompt


@pytest.mark.parametrize(
    ("choice", "tags", "single"),
    [
        ({"type": "any"}, 2, False),
        ({"type": "any", "disable_parallel_tool_use": True}, 2, True),
        ({"type": "tool", "name": "now"}, 1, False),
    ],
)
async def test_choices_bind_the_answer(choice: dict[str, Any], tags: int, single: bool) -> None:
    engine = engine_of([PARIS])
    assert (await ask(engine, tool_choice=choice))[1] == "tool_use"
    grammar = engine.calls[-1].sampling.grammar
    assert grammar is not None
    form = json.loads(grammar.format)
    assert (len(form["tags"]), form["stop_after_first"]) == (tags, single)


async def test_none_hides_the_tools_and_auto_binds_nothing() -> None:
    engine = engine_of([PARIS])
    assert await ask(engine, tool_choice={"type": "none"}) == ([("text", PARIS)], "end_turn")
    assert "weather" not in engine.calls[0].prompt
    await ask(engine, tool_choice={"type": "auto"})
    assert "weather" in engine.calls[-1].prompt and engine.calls[-1].sampling.grammar is None


async def test_one_call_at_a_time_is_no_stop_sequence() -> None:
    engine = engine_of([PARIS, "STOP:</tool_call>"])
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert (await ask(engine, tool_choice=choice))[1] == "tool_use"
    assert engine.calls[0].sampling.stop == ("</tool_call>",)


MADE = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
GAVE = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
TEXT = {"type": "text", "text": "a"}


def turns(made: list[Any], gave: list[Any]) -> dict[str, Any]:
    told = [{"role": "assistant", "content": made}, {"role": "user", "content": gave}]
    return {"messages": [*ASK["messages"], *told]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}]}, "tools[0].input_schema.not"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    (turns([MADE], [{**GAVE, "tool_use_id": "u"}]), "messages[2].content[0].tool_use_id"),
    (turns([MADE], [TEXT, GAVE]), "messages[2].content[1]"),
    (turns([MADE], [{**GAVE, "content": 3}]), "messages[2].content[0].content"),
    (turns([MADE], [{**GAVE, "content": [{"type": "image"}]}]), "messages[2].content[0].content[0].type"),
    (turns([{**MADE, "input": "{}"}], [GAVE]), "messages[1].content[0].input"),
    (turns([{**MADE, "x": 1}], [GAVE]), "messages[1].content[0].x"),
    (turns([GAVE], [TEXT]), "messages[1].content[0].type"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
async def test_wrong_wishes_are_named(body: dict[str, Any], field: str) -> None:
    async with serving(engine_of(["A"])) as client:
        reply = await client.post(PATH, json={**ASK, **body})
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(f"{field}: "), reply.text
