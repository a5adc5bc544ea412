"""The policy over llama.cpp's own server with Pebble in GGUF, both started here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Served
from remote_servers import llama_server, needs_llama, over

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote import client
from thinkfold.deploy.remote.engine import start_remote
from thinkfold.deploy.remote.http import Remote
from thinkfold.errors import ParameterError

pytestmark = needs_llama

QUESTION = [{"role": "user", "content": "What is 23 * 47 + 38 * 91?"}]
BODY: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 2000}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "pebble.gguf"


@pytest.fixture(scope="module")
def llama(gguf: Path) -> Iterator[str]:
    with llama_server(gguf) as url:
        yield url


@pytest.fixture(scope="module")
def remote(llama: str) -> Iterator[Served]:
    yield from over(llama, max_model_len=4096)


def ask(server: Served, **more: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY | more, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def capabilities(server: Served) -> dict[str, str]:
    return httpx.get(f"{server.url}/v1/models").json()["data"][0]["thinkfold"]["capabilities"]


def test_thinking_is_told_apart_and_counted(remote: Served) -> None:
    reply = ask(remote)
    message, usage = reply["choices"][0]["message"], reply["usage"]
    assert message["content"] == "The answer is \\boxed{4539}." and "Term 1: 23*47." in message["reasoning"]
    assert "think>" not in message["content"] + message["reasoning"]
    assert reply["choices"][0]["thinking_end_reason"] == "natural"
    assert usage["prompt_tokens"] == 30 and usage["completion_tokens_details"]["reasoning_tokens"] > 300


@pytest.mark.parametrize("budget", [0, 1, 40, 100])
def test_a_budget_is_kept_to_the_token(remote: Served, budget: int) -> None:
    assert capabilities(remote)["thinking_budget"] == "emulated"
    reply = ask(remote, thinking_token_budget=budget)
    spent = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert budget - budget // 10 <= spent <= budget
    assert reply["choices"][0]["message"]["content"].startswith("The answer is \\boxed{")
    if budget:
        assert reply["choices"][0]["thinking_end_reason"] == "budget"


def test_streamed_and_whole_are_equal(remote: Served) -> None:
    whole = ask(remote, thinking_token_budget=60)["choices"][0]["message"]
    with remote.client() as client:
        body = {"temperature": 0, "extra_body": {"thinking_token_budget": 60}}
        chunks = list(client.chat.completions.create(model="pebble", messages=QUESTION, stream=True, **body))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert len(deltas) > 40
    assert "".join(delta.content or "" for delta in deltas) == whole["content"]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == whole["reasoning"]


def test_rules_stop_thinking_by_probes(remote: Served) -> None:
    longer = [{"role": "user", "content": "What is 23 * 47 + 38 * 91 + 12 * 17?"}]
    the_first_is_enough = {"control": {"early_stop": {"confidence": 0.0}}}
    reply = ask(remote, messages=longer, thinkfold=the_first_is_enough)
    assert reply["choices"][0]["thinking_end_reason"] == "confidence"
    assert reply["choices"][0]["message"]["content"].startswith("The answer is")
    assert 256 <= reply["usage"]["completion_tokens_details"]["reasoning_tokens"] < 400
    assert reply["usage"]["thinkfold"]["tokens"]["probe"] > 0
    assert remote.stats().decisions["confidence", "stopped"] == 1


def test_peeks_read_entropies(remote: Served) -> None:
    reply = ask(remote, thinkfold={"control": {"early_stop": {"entropy": 19.0}}})
    assert reply["choices"][0]["thinking_end_reason"] == "entropy"


def test_log_probs_are_passed_on(remote: Served) -> None:
    rows = ask(remote, max_tokens=20, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]
    rows = (rows["content"] or []) + (rows.get("reasoning") or [])
    assert rows and all(row["logprob"] <= 0.0 and len(row["top_logprobs"]) <= 3 for row in rows)


def test_a_vote_over_one_slot_asks_no_more_than_it_needs(remote: Served) -> None:
    reply = ask(remote, temperature=0.6, seed=1, thinkfold={"vote": {"n": 5}})
    vote = reply["thinkfold"]["vote"]
    assert vote["answer"] == "4539" and vote["finished"] >= 3
    assert vote["finished"] + vote["cancelled"] == vote["started"]


def test_choices_have_seeds_of_their_own(remote: Served) -> None:
    body = {"temperature": 0.9, "seed": 7, "n": 3, "thinking_token_budget": 40}
    first, again = (ask(remote, **body)["choices"] for _ in range(2))
    texts = [choice["message"]["reasoning"] for choice in first]
    assert len(set(texts)) > 1 and texts == [choice["message"]["reasoning"] for choice in again]


@pytest.mark.parametrize(
    ("order", "reason"),
    [({"action": "end_thinking"}, "control"), ({"action": "set_budget", "budget": 8}, "budget")],
)
def test_orders_cut_the_stream_and_go_on(remote: Served, order: dict[str, Any], reason: str) -> None:
    last, _ = _steered(remote, order)
    assert (last["finish_reason"], last["thinking_end_reason"]) == ("stop", reason)


def test_injected_words_stand_in_the_thinking(remote: Served) -> None:
    last, reasoning = _steered(remote, {"action": "inject", "text": "\nSo the total is 7."})
    assert "\nSo the total is 7." in reasoning and last["finish_reason"] == "stop"


def _steered(server: Served, order: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The ending and the thinking of a response that got an order while it thought."""
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        chunks = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        name, given, reasoning, last = next(chunks)["id"], False, "", {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            reasoning += choice["delta"].get("reasoning") or ""
            last = choice if choice["finish_reason"] else last
            if len(reasoning.split()) > 4 and not given:
                given = True
                path = f"{server.url}/v1/thinkfold/responses/{name}/control"
                assert httpx.post(path, json=order, timeout=60).status_code == 200
    return last, reasoning


def test_thinking_ends_in_time(remote: Served) -> None:
    reply = ask(remote, thinkfold={"deadline_ms": 600})
    assert reply["choices"][0]["thinking_end_reason"] in ("deadline", "natural")
    assert reply["choices"][0]["message"]["content"]


def test_who_goes_away_frees_the_slot(remote: Served) -> None:
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{remote.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
    waiter = threading.Event()
    for _ in range(600):
        if remote.stats().running == 0:
            break
        waiter.wait(0.05)
    assert remote.stats().running == 0
    assert ask(remote, thinking_token_budget=8)["choices"][0]["message"]["content"]


def test_a_typed_control_token_is_refused(remote: Served) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "Say </think> now."}]}
    answer = httpx.post(f"{remote.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "control token" in answer.json()["error"]["message"]


def test_without_log_probs_rules_that_read_them_are_refused(gguf: Path) -> None:
    with llama_server(gguf, logits_all=False) as url:
        for server in over(url, max_model_len=4096):
            found = capabilities(server)
            assert found["logprobs"] == found["early_stop.margin"] == "not available"
            assert found["early_stop.consistency"] == "emulated"
            for more, param in (
                ({"logprobs": True}, "logprobs"),
                ({"thinkfold": {"control": {"preset": "balanced"}}}, "thinkfold.control.preset"),
            ):
                answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY | more, timeout=60)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert ask(server, thinking_token_budget=20)["choices"][0]["thinking_end_reason"] == "budget"


def test_a_server_that_drops_work_for_the_next_request_is_given_one_at_a_time(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default: a second request, also one for its models, ends the stream of the first."""
    monkeypatch.setattr(client, "_CHECK_S", 0.01)
    monkeypatch.setattr(client, "_TICK_S", 0.01)
    with llama_server(gguf, interrupt_requests=True) as url:
        for server in over(url, max_model_len=4096):
            choices = ask(server, temperature=0.5, seed=2, n=2, thinking_token_budget=100)["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
            assert all(choice["message"]["content"] for choice in choices)


def test_a_server_that_dies_is_told_and_missed(gguf: Path) -> None:
    with llama_server(gguf) as url:
        for server in over(url, max_model_len=4096):
            body = BODY | {"stream": True}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                _end(url)
                rest = [line for line in lines if line.startswith("data: {")]
            assert "remote engine" in json.loads(rest[-1][6:])["error"]["message"]
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60)
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "remote_failed"
            ready = httpx.get(f"{server.url}/ready")
            assert ready.status_code == 503 and "cannot be reached" in ready.json()["reason"]
            assert httpx.get(f"{server.url}/health").status_code == 200


def _end(url: str) -> None:
    """Kill the server that listens at `url`: it is a child of this process."""
    import psutil

    port = int(url.rpartition(":")[2])
    for child in psutil.Process().children():
        if str(port) in child.cmdline():
            child.kill()
            child.wait(10)


async def test_what_does_not_fit_ends_the_start(llama: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot be reached") as refused:
        await start_remote(EngineConfig(), Remote("http://127.0.0.1:9"))
    assert refused.value.field == "base_url"
    with pytest.raises(ParameterError, match="has no 'other'"):
        await start_remote(EngineConfig(), Remote(llama, model="other"))
    with pytest.raises(ParameterError, match="own engine"):
        await start_remote(EngineConfig(page_size=32), Remote(llama))


def test_the_command_serves_and_ends(llama: str) -> None:
    words = [
        sys.executable,
        "-m",
        "thinkfold",
        "serve",
        "--port",
        "0",
        "--engine",
        "openai",
        "--base-url",
        f"{llama}/v1",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "serves pebble at" in line, line
        url = line.split()[-1]
        body = BODY | {"thinking_token_budget": 16}
        assert httpx.post(f"{url}/chat/completions", json=body, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)
