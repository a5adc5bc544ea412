"""Control of running responses over a real socket, with Pebble's real weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from conftest import Served, run_server

from thinkfold.config import EngineConfig

QUESTION = [{"role": "user", "content": "What is 23 * 47 + 38 * 91?"}]
BODY: dict[str, Any] = {"model": "pebble", "messages": QUESTION, "temperature": 0, "max_tokens": 160}


@pytest.fixture(scope="module")
def pebble() -> Iterator[Served]:
    yield from run_server(EngineConfig(max_model_len=4096, max_num_seqs=8, kv_cache_bytes=128 * 1024 * 1024))


class Stream:
    """A streamed chat that is read while it is written."""

    def __init__(self, client: httpx.Client, response: httpx.Response) -> None:
        self._client = client
        self._lines = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
        self.reasoning = self.content = ""
        self.ending: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.id = self._read()["id"]

    def _read(self) -> dict[str, Any]:
        chunk = json.loads(next(self._lines))
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            self.reasoning += choice["delta"].get("reasoning") or ""
            self.content += choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                self.ending = choice
        self.last = chunk
        return chunk

    def until(self, words: int) -> Stream:
        """Read until so many words of thinking are there."""
        while len(self.reasoning.split()) < words:
            self._read()
        return self

    def finish(self) -> Stream:
        while not self.ending:
            self._read()
        for line in self._lines:
            if line != "[DONE]":
                self.last = json.loads(line)
        return self

    def order(self, action: str, **more: Any) -> httpx.Response:
        return order(self._client, self.id, action, **more)


def order(client: httpx.Client, name: str, action: str, **more: Any) -> httpx.Response:
    return client.post(f"/v1/thinkfold/responses/{name}/control", json={"action": action, **more})


@contextmanager
def streaming(served: Served, **more: Any) -> Iterator[Stream]:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}, **more}
    with (
        httpx.Client(base_url=served.url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        yield Stream(client, response)


@pytest.fixture(scope="module")
def undisturbed(pebble: Served) -> Stream:
    with streaming(pebble) as stream:
        return stream.finish()


def test_thinking_ends_now(pebble: Served, undisturbed: Stream) -> None:
    with streaming(pebble) as stream:
        answer = stream.until(10).order("end_thinking")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"id": stream.id, "object": "thinkfold.control", "action": "end_thinking"}
        stream.finish()
    assert stream.ending["thinking_end_reason"] == "control" and stream.ending["finish_reason"] == "stop"
    assert undisturbed.reasoning.startswith(stream.reasoning) and len(stream.reasoning) < len(undisturbed.reasoning)
    assert stream.content


def test_a_pause_changes_nothing_but_time(pebble: Served, undisturbed: Stream) -> None:
    with streaming(pebble) as stream:
        assert stream.until(10).order("pause").status_code == 200
        assert stream.order("pause").status_code == 409
        steps = pebble.stats().steps
        assert httpx.get(f"{pebble.url}/ready", timeout=60).status_code == 200
        assert pebble.stats().steps <= steps + 1, "an engine of paused requests does not step"
        assert stream.order("resume").status_code == 200
        stream.finish()
    assert (stream.reasoning, stream.content) == (undisturbed.reasoning, undisturbed.content)
    assert stream.last["usage"]["thinkfold"]["time"]["paused_s"] > 0


def test_a_budget_changes_while_it_runs(pebble: Served) -> None:
    with streaming(pebble) as stream:
        answer = stream.until(5).order("set_budget", budget=100)
        assert answer.json()["budget"] == 100
        stream.finish()
    usage = stream.last["usage"]["completion_tokens_details"]
    assert usage["reasoning_tokens"] <= 100 and stream.ending["thinking_end_reason"] == "budget"
    policy = stream.last["thinkfold"]["policy"]["thinking"]
    assert (policy["budget"], policy["source"]) == (100, "control")


def test_injected_text_is_thought(pebble: Served) -> None:
    with streaming(pebble) as stream:
        answer = stream.until(10).order("inject", text="\nWait, that is enough.\n")
        assert answer.json()["output_tokens"] > 10
        stream.order("end_thinking")
        stream.finish()
    assert "\nWait, that is enough." in stream.reasoning


def test_cancel_ends_it(pebble: Served) -> None:
    with streaming(pebble, n=2, temperature=0.6, seed=1) as stream:
        assert stream.until(10).order("cancel", choice=0).status_code == 200
        assert stream.order("cancel", choice=0).status_code == 404
        assert stream.order("cancel", keep_partial=False).json()["keep_partial"] is False
        stream.finish()
    assert stream.ending["finish_reason"] == "abort"
    assert stream.last["usage"]["thinkfold"]["tokens"]["discarded"] > 0


def test_who_may_ask(pebble: Served) -> None:
    with streaming(pebble, cache_salt="acme") as stream:
        stream.until(3)
        for more in ({}, {"cache_salt": "other"}, {"cache_salt": "acme", "prompt_cache_key": "k"}):
            answer = stream.order("pause", **more)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
        assert stream.order("cancel", cache_salt="acme").status_code == 200
        stream.finish()
        assert stream.order("cancel", cache_salt="acme").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"action": "stop"}, "action"),
        ({"action": "pause", "budget": 3}, "budget"),
        ({"action": "set_budget"}, "budget"),
        ({"action": "set_budget", "budget": -5}, "budget"),
        ({"action": "inject"}, "text"),
        ({"action": "inject", "text": "a", "token_ids": [1]}, "text"),
        ({"action": "inject", "token_ids": []}, "token_ids"),
        ({"action": "inject", "token_ids": [10**6]}, "token_ids"),
        ({"action": "pause", "colour": 1}, "colour"),
    ],
)
def test_wrong_orders_name_their_field(pebble: Served, body: dict[str, Any], param: str) -> None:
    with streaming(pebble) as stream:
        answer = stream.until(2).order(**body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
