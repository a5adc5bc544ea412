"""LangChain's OpenAI chat model on both of OpenAI's APIs: answers, streams, tools, structured answers, usage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from server_stand_in import EOS, ScriptedEngine, serving
from test_server_tools import PARIS, engine_of

langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")

APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@asynccontextmanager
async def model_of(engine: ScriptedEngine, responses: bool, **more: Any) -> AsyncIterator[Any]:
    async with serving(engine) as client:
        yield langchain.ChatOpenAI(
            model="tiny",
            base_url="http://test/v1",
            api_key="none",
            http_async_client=httpx.AsyncClient(transport=client._transport),
            max_retries=0,
            use_responses_api=responses,
            **more,
        )


@APIS
async def test_an_answer_and_its_stream(responses: bool) -> None:
    async with model_of(engine_of(["<think>", "w", "</think>", "A", "B"]), responses, stream_usage=True) as model:
        whole = await model.ainvoke("q")
        pieces = [piece async for piece in model.astream("q")]
    streamed = sum(pieces[1:], pieces[0])
    assert whole.text == streamed.text == "AB" and len(pieces) > 2
    for message in (whole, streamed):
        usage = message.usage_metadata
        assert usage["output_tokens"] == 6 and usage["output_token_details"]["reasoning"] == 1


@APIS
async def test_a_tool_is_called_and_its_result_goes_back(responses: bool) -> None:
    scripted = engine_of(["<think>", "w", "</think>", *PARIS])
    async with model_of(scripted, responses) as model:
        agent = model.bind_tools([weather])
        asked = await agent.ainvoke("q")
        pieces = [piece async for piece in agent.astream("q")]
        (call,) = asked.tool_calls
        (streamed,) = sum(pieces[1:], pieces[0]).tool_calls
        assert (call["name"], call["args"]) == (streamed["name"], streamed["args"]) == ("weather", {"city": "Paris"})
        result = messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
        scripted.scripts = [("Sunny.", EOS)]
        answer = await agent.ainvoke([messages.HumanMessage("q"), asked, result])
    assert answer.text == "Sunny."
    prompt = scripted.calls[-1].prompt
    assert prompt.count("<tool_call>") == 1 and "sunny in Paris" in prompt


@APIS
async def test_a_structured_answer(responses: bool) -> None:
    scripted = engine_of(['{"city": "Paris"}'])
    schema = {
        "title": "Place",
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    async with model_of(scripted, responses) as model:
        bound = model.with_structured_output(schema, method="json_schema", strict=True)
        assert await bound.ainvoke("q") == {"city": "Paris"}
    grammar = scripted.calls[0].sampling.grammar
    assert grammar is not None and "city" in grammar.format


async def test_effort_and_our_own_fields_pass_through() -> None:
    scripted = engine_of(["A"])
    extra = {"thinkfold": {"fold": {"policy": "off"}}}
    async with model_of(scripted, False, reasoning_effort="low", extra_body=extra) as model:
        reply = await model.ainvoke("q")
    assert reply.text == "A" and scripted.calls[0].thinking.reasoning_effort == "low"
    assert scripted.calls[0].fold is not None and scripted.calls[0].fold.policy == "off"
