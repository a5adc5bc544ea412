"""Tools in OpenAI Responses, through the real client: items, events, results that go back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from server_shapes import fold_response, named_events
from server_stand_in import EOS, ScriptedEngine, serving
from test_server_tools import DRAFT, PARIS, WEATHER, engine_of
from test_tool_calls import call

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "d", "parameters": WEATHER, "strict": None},
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]
PATH = "/v1/responses"
Item = tuple[str, str]


@asynccontextmanager
async def client_of(engine: ScriptedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(engine) as client:
        http = httpx.AsyncClient(transport=client._transport)
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def items(response: Response) -> list[Item]:
    shown = []
    for item in response.output:
        if isinstance(item, ResponseFunctionToolCall):
            assert item.id and item.call_id.startswith("call_")
            shown.append((item.name, item.arguments))
        else:
            assert isinstance(item, ResponseReasoningItem | ResponseOutputMessage) and item.content
            shown.append((item.type, getattr(item.content[0], "text", "")))
    return shown


async def ask(engine: ScriptedEngine, **body: Any) -> list[Item]:
    """What is in the reply; whole and streamed must agree, and the stream's events with each other."""
    body = {"model": "tiny", "input": "q", "tools": TOOLS, **body}
    async with client_of(engine) as client:
        whole = await client.responses.create(**body)
        async with client.responses.stream(**body) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    assert items(streamed) == items(whole)  # type: ignore[arg-type]
    calls = [item for item in whole.output if item.type == "function_call"]
    assert kinds.count("response.function_call_arguments.done") == len(calls) == len({c.call_id for c in calls})
    assert {item.status for item in calls} <= {"completed"} and whole.status == "completed"
    return items(whole)


async def test_a_call_in_pieces() -> None:
    engine = engine_of(["<think>", "w", "</think>", *PARIS])
    assert await ask(engine) == [("reasoning", "w"), ("weather", '{"city": "Paris"}')]
    assert '"name": "weather"' in engine.calls[0].prompt and engine.calls[0].sampling.grammar is None


async def test_text_and_parallel_calls() -> None:
    want = [("message", "Let me see."), ("weather", '{"city": "Paris"}'), ("now", "{}")]
    assert await ask(engine_of(["Let me see.\n", PARIS, "\n", call("now", {})])) == want


async def test_case_30_calls_drafted_in_thinking_are_not_made() -> None:
    assert await ask(engine_of(["<think>", *DRAFT, "</think>", "Sunny."])) == [
        ("reasoning", DRAFT),
        ("message", "Sunny."),
    ]


async def test_events_are_numbered_and_in_order() -> None:
    engine = engine_of(["<think>", "w", "</think>", "So: ", *PARIS])
    async with serving(engine) as client:
        reply = await client.post(PATH, json={"input": "q", "tools": TOOLS, "stream": True})
    final = fold_response(named_events(reply))
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert final["tools"][0]["name"] == "weather" and final["tool_choice"] == "auto"


async def test_results_go_back_by_id_and_by_items() -> None:
    engine = engine_of(["<think>", "w", "</think>", PARIS])
    async with client_of(engine) as client:
        first = await client.responses.create(model="tiny", input="q", tools=TOOLS)
        made = first.output[-1]
        assert made.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny <|im_end|>"}
        engine.scripts = [("Sunny.", EOS)]
        by_id = await client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=TOOLS)
        own: Any = [{"role": "user", "content": "q"}, *first.output, result]
        by_items = await client.responses.create(model="tiny", input=own, tools=TOOLS, store=False)
        assert by_id.output_text == by_items.output_text == "Sunny."
    assert engine.calls[1].prompt == engine.calls[2].prompt
    assert engine.calls[1].prompt.count("<tool_call>") == 1 and "sunny <|im_end|>" in engine.calls[1].prompt


async def test_a_call_that_was_cut_is_incomplete() -> None:
    engine = engine_of([*PARIS])
    async with serving(engine) as client:
        body = {"input": "q", "tools": TOOLS, "max_output_tokens": len(PARIS) - 20}
        whole = (await client.post(PATH, json=body)).json()
        final = fold_response(named_events(await client.post(PATH, json={**body, "stream": True})))
    for response in (whole, final):
        (item,) = response["output"]
        assert (item["type"], item["status"], response["status"]) == ("function_call", "incomplete", "incomplete")
        assert '{"city": "Paris"}'.startswith(item["arguments"])


async def test_choices_bind_the_answer() -> None:
    engine = engine_of([PARIS])
    named = {"type": "function", "name": "weather"}
    for choice, parallel in (("required", True), (named, False)):
        await ask(engine, tool_choice=choice, parallel_tool_calls=parallel)
        grammar = engine.calls[-1].sampling.grammar
        assert grammar is not None
        form = json.loads(grammar.format)
        assert form["stop_after_first"] is not parallel and len(form["tags"]) == (2 if parallel else 1)
    await ask(engine, tool_choice="none")
    assert "weather" not in engine.calls[-1].prompt and engine.calls[-1].sampling.grammar is None


async def test_a_format_and_tools_are_alternatives_and_control_stops_only_loops() -> None:
    engine = engine_of(["{}"])
    form = {"format": {"type": "json_schema", "name": "n", "schema": WEATHER}}
    await ask(engine, text=form, extra_body={"early_stop": {"entropy": 0.1}})
    grammar, control = engine.calls[0].sampling.grammar, engine.calls[0].control
    assert grammar is not None and grammar.field == "text.format.schema" and control is not None
    assert [part["type"] for part in json.loads(grammar.format)["elements"]] == ["json_schema", "tags_with_separator"]
    assert control.task == "tools"


CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOLS[0], "strict": True, "parameters": {"not": {}}}]}, "tools[0].parameters.not"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": TOOLS, "include": ["message.output_text.logprobs"]}, "include"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": [{"role": "user", "content": "q"}, RESULT]}, "input[1].call_id"),
    ({"input": [{"role": "user", "content": "q"}, {**CALL, "arguments": "[]"}, RESULT]}, "input[1].arguments"),
    ({"input": [{"role": "user", "content": "q"}, {**CALL, "name": 3}, RESULT]}, "input[1].name"),
    ({"input": [{"role": "user", "content": "q"}, {**CALL, "x": 3}, RESULT]}, "input[1].x"),
    ({"input": [{"role": "user", "content": "q"}, CALL, {**RESULT, "output": 3}]}, "input[2].output"),
    ({"input": [{"role": "user", "content": "q"}, CALL]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_wrong_wishes_are_named(body: dict[str, Any], param: str) -> None:
    async with serving(engine_of(["A"])) as client:
        reply = await client.post(PATH, json={"input": "q", **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


async def test_without_tools_their_options_ask_for_nothing() -> None:
    async with serving(ScriptedEngine()) as client:
        reply = await client.post(PATH, json={"input": "q", "tool_choice": "auto", "parallel_tool_calls": True})
        refused = await client.post(PATH, json={"input": "q", "tools": TOOLS})
    assert reply.status_code == 200, reply.text
    assert refused.json()["error"]["param"] == "tools" and "shows no tools" in refused.json()["error"]["message"]
