"""The OpenAI client's Responses against Pebble, over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import Served
from openai.types.responses import Response, ResponseOutputMessage, ResponseReasoningItem

ASK: dict[str, Any] = {"model": "pebble", "input": "What is 3 * 4?", "temperature": 0, "max_output_tokens": 300}
SEALED: Any = ["reasoning.encrypted_content"]


@pytest.fixture(scope="module")
def client(pebble: Served) -> Iterator[openai.OpenAI]:
    with pebble.client() as client:
        yield client


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> Response:
    return client.responses.create(**ASK, reasoning={"effort": "low"}, include=SEALED)


def parts(response: Response) -> list[tuple[str, str | None]]:
    shown = []
    for item in response.output:
        assert isinstance(item, ResponseReasoningItem | ResponseOutputMessage) and item.content
        shown.append((item.type, getattr(item.content[0], "text", None)))
    return shown


def test_case_56_a_stream_tells_the_same_response(client: openai.OpenAI, whole: Response) -> None:
    extra = {"thinkfold": {"events": True}}
    with client.responses.stream(**ASK, reasoning={"effort": "low"}, include=SEALED, extra_body=extra) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [kind for kind, _ in parts(whole)] == ["reasoning", "message"] and "12" in whole.output_text
    assert parts(final) == parts(whole)  # type: ignore[arg-type]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.usage and final.usage and whole.usage.output_tokens == final.usage.output_tokens
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert whole.to_dict()["thinkfold"]["policy"]["thinking"]["source"] == "reasoning_effort"  # type: ignore[index]


def test_responses_are_found_continued_and_forgotten(client: openai.OpenAI, whole: Response) -> None:
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    chained = client.responses.create(
        **{**ASK, "input": "What is 2 * 3?", "max_output_tokens": 8}, previous_response_id=whole.id
    )
    items: Any = [
        {"role": "user", "content": ASK["input"]},
        *whole.output,
        {"role": "user", "content": "What is 2 * 3?"},
    ]
    by_items = client.responses.create(**{**ASK, "input": items, "max_output_tokens": 8}, store=False)
    assert parts(chained) == parts(by_items)
    assert chained.usage and by_items.usage and chained.usage.input_tokens == by_items.usage.input_tokens
    client.responses.delete(chained.id)
    for lost in (chained.id, by_items.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(lost)


def test_case_56_cut_inside_thinking(client: openai.OpenAI) -> None:
    cut = client.responses.create(**{**ASK, "max_output_tokens": 8})
    events = list(client.responses.create(**{**ASK, "max_output_tokens": 8}, stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    for response in (cut, last.response):
        assert response.status == "incomplete" and response.incomplete_details
        assert response.incomplete_details.reason == "max_output_tokens"
        assert [kind for kind, _ in parts(response)] == ["reasoning"]
        assert response.usage and response.usage.output_tokens == 8
    assert parts(cut) == parts(last.response)


def test_case_19_a_budget_is_kept(client: openai.OpenAI) -> None:
    response = client.responses.create(**{**ASK, "max_output_tokens": 40}, extra_body={"thinking_token_budget": 8})
    assert response.usage and 0 < response.usage.output_tokens_details.reasoning_tokens <= 8


def test_case_29_a_schema_binds_the_answer_and_not_the_thinking(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    text: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema}}
    response = client.responses.create(**ASK, text=text, extra_body={"thinking_token_budget": 8})
    assert [kind for kind, _ in parts(response)] == ["reasoning", "message"] and response.status == "completed"
    assert isinstance(json.loads(response.output_text)["answer"], int)


def test_cache_keys_keep_prefixes_apart(client: openai.OpenAI) -> None:
    def cached(key: str) -> int:
        response = client.responses.create(
            **{**ASK, "input": "3 * 4, " * 40, "max_output_tokens": 1}, prompt_cache_key=key, store=False
        )
        assert response.usage
        return response.usage.input_tokens_details.cached_tokens

    assert [cached("a"), cached("b")] == [0, 0] and cached("a") > 0 and cached("b") > 0 and cached("c") == 0


def test_refusals_are_the_clients_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type: should be 'function'"):
        client.responses.create(**ASK, tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**ASK, "model": "gpt"})
