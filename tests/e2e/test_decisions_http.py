"""Best of N and search over a real socket: Pebble's thinking, and verifiers that fail in every way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from conftest import Served, run_server

from thinkfold.config import EngineConfig

QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]
COUNTDOWN = [{"role": "user", "content": "Make 58 from the numbers 3, 5, 11. Use every number exactly once."}]
BEAM = {"width": 2, "branch": 2, "depth": 3, "min_step_tokens": 16, "max_step_tokens": 32, "max_tokens": 600}


class Judge(BaseHTTPRequestHandler):
    """Gives right answers .9, by path in time, too late, or wrong in one of several ways."""

    gate = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["question"] in (QUESTION[0]["content"], COUNTDOWN[0]["content"])
        if self.path == "/mute":
            self.gate.wait(20)
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()
        scores = [0.9 if "12" in one["answer"] else 0.1 for one in body["items"]]
        self.wfile.write(b'{"scores": [NaN]}' if self.path == "/nan" else json.dumps({"scores": scores}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    judge = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    judge.daemon_threads = True
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{judge.server_port}"
    verifiers = tuple(f"{name}={url}/{name}" for name in ("good", "nan", "broken", "mute"))
    yield from run_server(EngineConfig(max_model_len=2048, kv_cache_bytes=64 << 20, verifiers=verifiers))
    Judge.gate.set()
    judge.shutdown()
    judge.server_close()


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"messages": QUESTION, "thinking_token_budget": 40, "max_tokens": 90, "seed": 1, **more}
    return client.post("/v1/chat/completions", json=body)


def held(served: Served) -> int:
    return served.stats().kv_pages.held


def test_a_verifier_chooses_and_the_bill_is_one(client: httpx.Client, served: Served) -> None:
    body = ask(client, best_of={"n": 4, "verifier": "good"}, temperature=0.6).json()
    found = body["thinkfold"]["best_of"]
    assert found["verifier"] == "good" and found["started"] == 4 and found["rule"] in ("all", "good")
    assert found["answer"] in body["choices"][0]["message"]["content"] and len(body["choices"]) == 1
    best = max(one["score"] for one in found["scores"])
    assert best in (0.1, 0.9) and any(one["sample"] == found["sample"] for one in found["scores"])
    usage = body["usage"]
    assert usage["prompt_tokens"] < 60 and usage["thinkfold"]["tokens"]["computed_prompt"] <= usage["prompt_tokens"] + 4
    assert usage["completion_tokens"] > body["thinkfold"]["best_of"]["finished"] * 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 90, "thinking_token_budget": 40}),
        (
            "/v1/messages",
            {"messages": QUESTION, "max_tokens": 90, "thinking": {"type": "enabled", "budget_tokens": 40}},
        ),
    ],
    ids=["responses", "messages"],
)
def test_other_apis_let_a_verifier_choose_and_search(path: str, body: dict[str, Any], client: httpx.Client) -> None:
    best = client.post(path, json={**body, "seed": 1, "best_of": {"n": 2, "verifier": "good"}})
    assert best.status_code == 200, best.text
    found = best.json()["thinkfold"]["best_of"]
    assert found["misses"] == 0 and found["answer"] in best.text, "the verifier read the question"
    walked = client.post(path, json={**body, "seed": 1, "search": {**BEAM, "depth": 1}})
    assert walked.status_code == 200 and walked.json()["thinkfold"]["search"]["deepest"] == 1, walked.text


@pytest.mark.parametrize(
    ("name", "why"), [("nan", "finite"), ("broken", "it answered 500"), ("mute", "no score within 0.3 s")]
)
def test_verifiers_that_fail_are_misses(name: str, why: str, client: httpx.Client) -> None:
    body = ask(client, best_of={"n": 2, "verifier": name, "timeout_s": 0.3}).json()
    found = body["thinkfold"]["best_of"]
    assert (found["rule"], found["misses"]) == ("unscored", found["finished"]) and found["finished"] > 0
    assert all(one["score"] is None and why in one["error"] for one in found["scores"])
    assert body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("verifier", ["http://127.0.0.1:1/", "nobody", {"url": "http://127.0.0.1:1/"}])
def test_clients_name_verifiers_that_the_operator_has_set(verifier: Any, client: httpx.Client) -> None:
    answer = ask(client, best_of={"verifier": verifier})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "best_of.verifier", answer.text


def search(client: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"messages": COUNTDOWN, "seed": 3, "temperature": 0.8, "search": {**BEAM, **more}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("more", [{}, {"kind": "tree", "score": "probe"}, {"verifier": "good"}])
def test_a_countdown_question_by_search(more: dict[str, Any], client: httpx.Client, served: Served) -> None:
    body = search(client, **more)
    found, (choice,) = body["thinkfold"]["search"], body["choices"]
    nodes = found["nodes"]
    assert found["kind"] == more.get("kind", "beam") and found["rule"] and nodes[found["node"]]["fate"] == "chosen"
    assert found["answer"] is None or found["answer"] in choice["message"]["content"]
    assert choice["message"]["reasoning"] and choice["finish_reason"] in ("stop", "length")
    assert found["kept_tokens"] + found["discarded_tokens"] == found["tokens"] <= BEAM["max_tokens"]
    steps = sum(node["tokens"] for node in nodes)
    assert steps <= found["tokens"] - found["probe_tokens"] and (found["probe_tokens"] > 0) == ("score" in more)
    assert all(node["parent"] is None or nodes[node["parent"]]["depth"] == node["depth"] - 1 for node in nodes)
    usage = body["usage"]
    tokens = usage["thinkfold"]["tokens"]
    assert usage["prompt_tokens"] < 60 and tokens["computed_prompt"] <= usage["prompt_tokens"]
    assert usage["completion_tokens"] == found["tokens"]
    assert held(served) == 0 and served.stats().handles == 0


def test_a_seed_walks_the_same_way_again(client: httpx.Client) -> None:
    first, second = (search(client, depth=2) for _ in range(2))
    assert first["thinkfold"]["search"]["nodes"] == second["thinkfold"]["search"]["nodes"]
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_a_stream_tells_rounds_and_then_the_tree(client: httpx.Client) -> None:
    body = {"messages": COUNTDOWN, "search": BEAM, "stream": True, "thinkfold": {"events": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    states = [json.loads(line[6:]).get("thinkfold", {}).get("search") for line in lines]
    told = [state for state in states if state]
    assert len(told) >= 3 and all(state["nodes"] == [] for state in told[:-2]) and told[-1]["nodes"]
    assert [state["expanded"] for state in told] == sorted(state["expanded"] for state in told)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"vote": True}, "search"),
        ({"temperature": 0}, "temperature"),
        ({"thinking_token_budget": 0}, "search"),
        ({"early_stop": {"entropy": 0.1}}, "search"),
        ({"thinkfold": {"deadline_ms": 1000}}, "search"),
        ({"search": {"width": 16, "branch": 4}}, "search.width"),
        ({"search": {"verifier": "http://127.0.0.1:1"}}, "search.verifier"),
        ({"search": {"verifier": "nobody"}}, "search.verifier"),
        ({"search": {"max_tokens": 100}}, "search.max_tokens"),
    ],
)
def test_what_makes_no_search_is_refused(more: dict[str, Any], param: str, client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": COUNTDOWN, "search": BEAM, **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("more", "event"),
    [
        ({"best_of": {"n": 8, "verifier": "good"}, "ignore_eos": True}, "best_of"),  # while samples think
        ({"best_of": {"n": 8, "verifier": "mute", "timeout_s": 30}}, "best_of"),  # while the verifier is asked
        ({"search": {**BEAM, "depth": 40, "max_tokens": None}}, "search"),
        ({"search": {**BEAM, "verifier": "mute", "timeout_s": 30}}, None),
    ],
)
def test_case_45_a_client_that_leaves_frees_everything(
    more: dict[str, Any], event: str | None, client: httpx.Client, served: Served
) -> None:
    body = {"messages": COUNTDOWN, "stream": True, "max_tokens": 1500, "thinkfold": {"events": True}, **more}
    if event is None:  # nothing is told before the verifier has answered
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=2))
    else:
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            next(line for line in stream.iter_lines() if line == f"event: thinkfold.{event}")
    gone = threading.Event()

    def empty() -> bool:
        stats = served.stats()
        return held(served) == stats.running == stats.waiting == stats.handles == 0

    for _ in range(200):
        if empty():
            break
        gone.wait(0.05)
    assert empty()


def test_a_vote_asks_its_last_question_and_nonsense_changes_nothing(client: httpx.Client, served: Served) -> None:
    """Pebble answers what it does not know in one of several sentences, and the call about them too."""
    wish = {"messages": [{"role": "user", "content": "Tell me about roses."}], "temperature": 1.0, "max_tokens": 60}
    vote = {"n": 4, "mode": "all", "stop": "exact"}
    plain = ask(client, **wish, vote=vote).json()
    asked = ask(client, **wish, vote={**vote, "equality": "call"}).json()
    classes = plain["thinkfold"]["vote"]["classes"]
    assert len(classes) > 1 and {one["rung"] for one in classes} == {"canonical"}, "there is something to ask about"
    assert asked["thinkfold"]["vote"] == plain["thinkfold"]["vote"]
    assert asked["choices"][0]["message"] == plain["choices"][0]["message"]
    costs, before = (body["usage"]["thinkfold"]["tokens"] for body in (asked, plain))
    assert before["probe"] == 0 and costs["probe"] > 100, "the prompt of the call and its reply"
    assert (costs["thinking"], costs["answer"]) == (before["thinking"], before["answer"])
    assert asked["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert held(served) == 0


@pytest.mark.parametrize("equality", ["embedding", True, 3, ["call"]])
def test_an_equality_that_is_not_there_is_refused(equality: Any, client: httpx.Client) -> None:
    answer = ask(client, vote={"equality": equality})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "vote.equality", answer.text
