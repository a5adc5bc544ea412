"""The Anthropic client against Pebble, over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from conftest import Served

BUDGET: Any = {"type": "enabled", "budget_tokens": 600}
QUESTION: Any = {"role": "user", "content": "What is 3 * 4?"}
GREEDY = {"temperature": 0}  # a field that this client has no argument for
ASK: dict[str, Any] = {"model": "pebble", "max_tokens": 700, "messages": [QUESTION], "extra_body": GREEDY}


@pytest.fixture(scope="module")
def claude(pebble: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=pebble.url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def whole(claude: anthropic.Anthropic) -> anthropic.types.Message:
    return claude.messages.create(**ASK, thinking=BUDGET)


def test_case_55_a_stream_tells_the_same_message(claude: anthropic.Anthropic, whole: anthropic.types.Message) -> None:
    body = {**ASK, "extra_body": {**GREEDY, "thinkfold": {"events": True}}}
    with claude.messages.stream(**body, thinking=BUDGET) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert streamed.to_dict()["content"] == whole.to_dict()["content"]
    assert (streamed.stop_reason, whole.stop_reason) == ("end_turn", "end_turn")
    assert whole.content[1].type == "text" and "12" in whole.content[1].text
    assert (kinds[0], kinds[-1], kinds.count("signature")) == ("message_start", "message_stop", 1)
    ours, theirs = streamed.usage, whole.usage
    assert ours.output_tokens == theirs.output_tokens and ours.output_tokens_details == theirs.output_tokens_details
    assert theirs.output_tokens_details and 0 < theirs.output_tokens_details.thinking_tokens < theirs.output_tokens


def test_case_55_blocks_go_back_as_history(claude: anthropic.Anthropic, whole: anthropic.types.Message) -> None:
    after: Any = {"role": "user", "content": "What is 2 * 3?"}
    history: Any = [QUESTION, {"role": "assistant", "content": whole.content}, after]
    again = claude.messages.create(**{**ASK, "messages": history, "max_tokens": 20}, thinking={"type": "adaptive"})
    assert (again.stop_reason, again.usage.output_tokens) == ("max_tokens", 20)
    counted = claude.messages.count_tokens(model="pebble", messages=history, thinking=BUDGET)
    assert counted.input_tokens == again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)
    forged = [{"type": "thinking", "thinking": "no", "signature": "eA=="}, *whole.content]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[0\].signature"):
        claude.messages.create(**{**ASK, "messages": [QUESTION, {"role": "assistant", "content": forged}, after]})


def test_case_19_a_budget_is_kept(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**{**ASK, "max_tokens": 60}, thinking={"type": "enabled", "budget_tokens": 8})
    details = message.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens <= 8
    assert message.to_dict()["thinkfold"]["policy"]["thinking"]["budget"] == 8  # type: ignore[index]


def test_case_55_nobody_thinks_who_was_not_asked(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**{**ASK, "max_tokens": 12})
    assert [block.type for block in message.content] == ["text"]


def test_case_26_stop_sequences_sleep_while_thinking(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**ASK, thinking=BUDGET, stop_sequences=["12"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "12")
    assert message.content[0].type == "thinking" and "12" in message.content[0].thinking


def test_case_29_a_schema_binds_the_answer_and_not_the_thinking(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = claude.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 8}, output_config=form)
    assert [block.type for block in message.content] == ["thinking", "text"] and message.stop_reason == "end_turn"
    assert message.content[1].type == "text" and isinstance(json.loads(message.content[1].text)["answer"], int)


def test_models_are_listed(claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name) == ("pebble", "model", "pebble")
    assert model.max_input_tokens and claude.models.retrieve("pebble").to_dict() == model.to_dict()


def test_refusals_are_the_clients_own_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools: this model's chat template shows no tools"):
        claude.messages.create(**ASK, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**ASK, "model": "claude"})
