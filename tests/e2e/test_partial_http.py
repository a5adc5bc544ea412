"""Partial decoding over a real socket, with Pebble's real weights: an outside search can drive it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Served, run_server

from thinkfold.config import EngineConfig

QUESTION = [{"role": "user", "content": "What is 23 * 47?"}]
PATH = "/v1/thinkfold/partial"
CONTROL = "/v1/thinkfold/responses"


@pytest.fixture(scope="module")
def pebble() -> Iterator[Served]:
    yield from run_server(EngineConfig(max_model_len=2048, max_num_seqs=8, kv_cache_bytes=96 * 1024 * 1024))


@pytest.fixture
def client(pebble: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pebble.url, timeout=120) as client:
        yield client


def part(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_parts_make_up_the_whole(client: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 120}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    first = part(client, **body, until={"max_tokens": 10})["choices"][0]
    assert (first["finish_reason"], first["output_tokens"]) == ("boundary", 10)
    reasoning, text, last = first["reasoning"], first["text"], first
    for _ in range(20):
        until = {"at": "sentence", "min_tokens": 20, "max_tokens": 60}
        last = part(client, handle=last["handle"]["id"], until=until)["choices"][0]
        reasoning, text = reasoning + last["reasoning"], text + last["text"]
        if last["finish_reason"] != "boundary":
            break
        assert last["handle"]["position"] == last["output_tokens"]
    assert (reasoning, text) == (whole["reasoning"] or "", whole["content"])
    assert last["handle"] is None


def test_branches_of_a_handle_and_its_end(client: httpx.Client) -> None:
    root = part(client, messages=QUESTION, temperature=0.8, seed=5, until={"max_tokens": 12})["choices"][0]
    handle = root["handle"]["id"]
    assert len(root["handle"]["state_hash"]) == 64 and root["handle"]["ttl_s"] > 0
    grown = part(client, handle=handle, n=4, until={"max_tokens": 24})
    assert [c["index"] for c in grown["choices"]] == [0, 1, 2, 3]
    assert len({c["handle"]["state_hash"] for c in grown["choices"]}) == 4
    assert (
        grown["usage"]["completion_tokens"] == 4 * 24 and grown["usage"]["thinkfold"]["tokens"]["computed_prompt"] == 0
    )
    assert client.delete(f"{PATH}/{handle}").json() == {"handle": handle, "object": "thinkfold.handle", "deleted": True}
    for answer in (client.delete(f"{PATH}/{handle}"), client.post(PATH, json={"handle": handle})):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert part(client, handle=grown["choices"][2]["handle"]["id"], until={"max_tokens": 3})


def test_a_part_tells_its_cost(client: httpx.Client) -> None:
    spent = part(client, prompt="Hello", thinkfold={"max_cost": 5.0}, until={"max_tokens": 4})["usage"]["thinkfold"]
    assert 0 < spent["cost"] < 5.0 and spent["tokens"]["answer"] + spent["tokens"]["thinking"] == 4


def test_a_running_response_is_forked(client: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 200, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        name = next(line for line in lines if line.startswith("data: ")).split('"id":"')[1].split('"')[0]
        order = {"action": "fork", "at": 0}
        for _ in range(200):  # until its prompt is computed
            answer = client.post(f"{CONTROL}/{name}/control", json=order)
            if answer.status_code != 409:
                break
        assert answer.status_code == 200, answer.text
        handle = answer.json()["handle"]
        assert handle["position"] == 0
        wrong = client.post(f"{CONTROL}/{name}/control", json={"action": "fork", "at": 10**6})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "at"
    assert part(client, handle=handle["id"], until={"max_tokens": 5})["choices"][0]["output_tokens"] == 5


def test_a_foreign_handle_is_not_there(client: httpx.Client) -> None:
    mine = part(client, prompt="Hello", cache_salt="acme", until={"max_tokens": 2})["choices"][0]["handle"]["id"]
    assert client.post(PATH, json={"handle": mine}).status_code == 404
    assert client.delete(f"{PATH}/{mine}").status_code == 404
    assert client.delete(f"{PATH}/{mine}", params={"cache_salt": "acme"}).status_code == 200


def test_the_effort_and_a_budget_of_none_reach_the_template(
    client: httpx.Client, pebble: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, asked = pebble.engine.prompts, []
    encode = prompts.encode_chat
    monkeypatch.setattr(prompts, "encode_chat", lambda chat, **more: asked.append(more) or encode(chat, **more))
    part(client, messages=QUESTION, reasoning_effort="low", until={"max_tokens": 2})
    opened = [*QUESTION, {"role": "assistant", "content": "<think>So"}]
    part(client, messages=opened, thinking_token_budget=0, until={"max_tokens": 2})
    assert [(more["reasoning_effort"], more["closes"]) for more in asked] == [("low", False), (None, True)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "handle"),
        ({"handle": "h", "prompt": "a"}, "handle"),
        ({"handle": "h", "top_p": 0.5}, "top_p"),
        ({"prompt": "a", "until": {}}, "until"),
        ({"prompt": "a", "until": {"at": "word"}}, "until.at"),
        ({"prompt": "a", "until": {"max_tokens": 0}}, "until.max_tokens"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "early_stop": {"entropy": 0.1}}, "early_stop"),
        ({"prompt": "a", "vote": True}, "vote"),
        ({"prompt": "a", "thinkfold": {"control": {"preset": "balanced"}}}, "thinkfold.control"),
        ({"prompt": "a", "thinkfold": {"vote": True}}, "thinkfold.vote"),
        ({"prompt": "a", "thinkfold": {"events": True}}, "thinkfold.events"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a", "early_stop_threshold": {"entropy": 0.1}}, "early_stop_threshold"),
        ({"prompt": "a", "thinkfold": {"events": False}}, "thinkfold.events"),
    ],
)
def test_wrong_parts_name_their_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post(PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
