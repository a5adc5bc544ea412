"""The policy over another server: thinkfold itself behind a real socket, and a proxy that spoils its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from conftest import Served
from remote_servers import Spoiler, over, spoiling

from tests.browser import browsing, needs_browser, watched
from thinkfold.deploy.remote.engine import RemoteEngine
from thinkfold.deploy.remote.service import check_service
from thinkfold.errors import ParameterError
from thinkfold.server.state import ServerOptions
from thinkfold.server.tiers import ServedTier, TierTable
from thinkfold.types import FoldParams, Tier

QUESTION = [{"role": "user", "content": "What is 23 * 47 + 38 * 91?"}]
SHORT = [{"role": "user", "content": "12+7*3"}]
BODY: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 72}


@pytest.fixture(scope="module")
def spoiler(pebble: Served) -> Iterator[Spoiler]:
    with spoiling(pebble.url) as spoiler:
        yield spoiler


@pytest.fixture(scope="module")
def remote(spoiler: Spoiler) -> Iterator[Served]:
    yield from over(spoiler.url, max_num_seqs=4)


@pytest.fixture(autouse=True)
def _no_fault(spoiler: Spoiler) -> Iterator[None]:
    yield
    spoiler.fault, spoiler.status, spoiler.headers = "", 200, {}


def ask(server: Served, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=BODY | more, timeout=60)


def test_it_says_what_it_is(remote: Served, pebble: Served) -> None:
    card = httpx.get(f"{remote.url}/v1/models").json()["data"][0]
    ours, own = card["thinkfold"], httpx.get(f"{pebble.url}/v1/models").json()["data"][0]["thinkfold"]
    assert ours["engine"] == "openai" and own["engine"] == "thinkfold"
    assert set(ours["capabilities"]) == set(own["capabilities"])
    assert set(own["capabilities"].values()) == {"native"}
    for name in ("fold", "pause", "fork", "partial", "search"):
        assert ours["capabilities"][name] == "not available"
    assert ours["capabilities"]["thinking_budget"] == "native", "the server below counts by itself"
    assert ours["capabilities"]["early_stop.margin"] == "emulated"
    assert ours["fold"] == {"available": False}


def test_it_writes_what_the_server_writes(remote: Served, pebble: Served) -> None:
    mine, its = (ask(server, messages=SHORT).json()["choices"][0] for server in (remote, pebble))
    assert mine["message"] == its["message"] and mine["message"]["reasoning"]
    assert mine["finish_reason"] == its["finish_reason"]
    assert mine["thinking_end_reason"] == its["thinking_end_reason"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_all_apis_answer(remote: Served, path: str) -> None:
    body: dict[str, Any] = {"model": "pebble", "temperature": 0}
    if path == "/v1/responses":
        body |= {"input": QUESTION[0]["content"], "max_output_tokens": 40}
    else:
        body |= {"max_tokens": 40} | ({"prompt": "2 + 3 ="} if path == "/v1/completions" else {"messages": QUESTION})
    answer = httpx.post(f"{remote.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage.get("completion_tokens") or usage.get("output_tokens")) > 0


def test_a_budget_ends_thinking(remote: Served) -> None:
    reply = ask(remote, thinking_token_budget=24).json()
    choice = reply["choices"][0]
    assert choice["thinking_end_reason"] == "budget" and choice["message"]["content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 28


def test_it_streams(remote: Served) -> None:
    with remote.client() as client:
        chunks = list(client.chat.completions.create(model="pebble", messages=SHORT, stream=True, **_few(80)))
    assert len(chunks) > 10
    whole = ask(remote, messages=SHORT).json()["choices"][0]["message"]
    thought = [getattr(chunk.choices[0].delta, "reasoning", None) or "" for chunk in chunks if chunk.choices]
    assert "".join(thought) == whole["reasoning"]


def _few(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"thinkfold": {"fold": {"policy": "eager"}}}, "thinkfold.fold.policy"),
        ({"thinkfold": {"fold": {"entries": 8}}}, "thinkfold.fold.entries"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"search": {"kind": "beam"}, "temperature": 1}, "search"),
        ({"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_needs_our_kv_is_refused_by_name(remote: Served, more: dict[str, Any], param: str) -> None:
    answer = ask(remote, **more)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and "remote" in answer.json()["error"]["message"]


def test_parts_are_refused(remote: Served) -> None:
    answer = httpx.post(
        f"{remote.url}/v1/thinkfold/partial", json={"messages": QUESTION, "until": {"max_tokens": 8}}, timeout=60
    )
    assert answer.status_code == 400 and "remote" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(("action", "status"), [("pause", 400), ("fork", 400), ("end_thinking", 200), ("cancel", 200)])
def test_orders_to_a_running_response(remote: Served, action: str, status: int) -> None:
    with httpx.stream(
        "POST", f"{remote.url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=60
    ) as response:
        lines = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        first = next(lines)
        path = f"{remote.url}/v1/thinkfold/responses/{first['id']}/control"
        while not any(c["delta"].get("reasoning") for c in next(lines)["choices"]):
            pass
        answer = httpx.post(path, json={"action": action}, timeout=60)
        assert answer.status_code == status, answer.text
        last = [c for chunk in lines for c in chunk["choices"] if c["finish_reason"]][-1]
    expected = {"end_thinking": ("stop", "control"), "cancel": ("abort", "unclosed")}
    if action in expected:
        assert (last["finish_reason"], last["thinking_end_reason"]) == expected[action]


def test_a_vote_cancels_siblings(remote: Served, spoiler: Spoiler) -> None:
    body = {"temperature": 0.7, "seed": 3, "thinking_token_budget": 24, "thinkfold": {"vote": {"n": 4}}}
    reply = ask(remote, **body).json()
    vote = reply["thinkfold"]["vote"]
    assert vote["finished"] >= 2 and vote["running"] == 0 and reply["choices"][0]["message"]["content"]
    assert vote["finished"] + vote["cancelled"] == vote["started"]
    _until(lambda: spoiler.open == 0)


def test_a_session_spends_its_budget(remote: Served) -> None:
    session = {"thinkfold": {"session": {"id": "s1", "total_budget": 30}}}
    first = ask(remote, **session).json()
    assert first["choices"][0]["thinking_end_reason"] == "budget"
    second = ask(remote, **session).json()["thinkfold"]
    assert second["session"]["remaining"] == 0 and second["session"]["call_budget"] == 30, "a call has its floor"
    assert second["session"]["spent"] >= first["thinkfold"]["session"]["spent"] + 20
    assert second["policy"]["clamped"][0]["by"] == "session"


@needs_browser
def test_the_page_asks_and_shows_no_memory_that_is_not_ours(remote: Served) -> None:
    with browsing() as browser, watched(browser, f"{remote.url}/") as page:
        page.locator("#state[data-good=true]").wait_for()
        assert not page.locator("#map").is_visible() and not page.locator("#fold-set").is_visible()
        page.fill("#question", SHORT[0]["content"])
        page.click("#go")
        page.locator("#answer p").first.wait_for()
        assert page.locator("#pause").is_disabled()
        page.locator("#go:enabled").wait_for()
        assert page.inner_text("#answer") and "estimated" in page.inner_text("#playground .costs")
        assert not page.locator("#fold-note").is_visible()


def test_tiers_that_cannot_be_had_end_the_start(remote: Served) -> None:
    engine = remote.engine
    assert isinstance(engine, RemoteEngine)

    def options(**more: Any) -> ServerOptions:
        given = {name: more.pop(name) for name in ("fold",) if name in more}
        return ServerOptions(tiers=TierTable({"free": ServedTier(Tier("free", 100, **more), **given)}, "free"))

    check_service(engine, options(weight=2.0))
    for wrong, field in ((options(kv_quota=0.5), "kv_quota"), (options(fold=FoldParams("eager")), "fold")):
        with pytest.raises(ParameterError) as refused:
            check_service(engine, wrong)
        assert refused.value.field == f"tiers.free.{field}"


def test_costs_are_told(remote: Served) -> None:
    costs = ask(remote, thinking_token_budget=12).json()["usage"]["thinkfold"]
    assert costs["tokens"]["thinking"] > 0 and costs["tokens"]["answer"] > 0
    assert costs["kv"]["byte_seconds"] > 0 and costs["kv"]["peak_entries"] > costs["tokens"]["prompt"]
    assert costs["time"]["thinking_s"] > 0
    assert set(costs["estimated"]) == {"kv", "time.device_s"}


@pytest.mark.parametrize(("status", "ours"), [(500, 502), (503, 429), (429, 429), (400, 502)])
def test_a_refusal_is_passed_on(remote: Served, spoiler: Spoiler, status: int, ours: int) -> None:
    spoiler.fault, spoiler.status, spoiler.headers = "refuse", status, {"Retry-After": "7"}
    for stream in (False, True):
        answer = ask(remote, stream=stream)
        assert answer.status_code == ours and "not now" in answer.json()["error"]["message"]
        assert ours != 429 or answer.headers["Retry-After"] == "7"


@pytest.mark.parametrize(("fault", "says"), [("cut", "cut its stream"), ("junk", "no JSON")])
def test_a_spoilt_stream_is_an_error(remote: Served, spoiler: Spoiler, fault: str, says: str) -> None:
    spoiler.fault = fault
    whole = ask(remote)
    assert whole.status_code == 502 and says in whole.json()["error"]["message"]
    with remote.client() as client, pytest.raises(openai.APIError, match=says):
        list(client.chat.completions.create(model="pebble", messages=QUESTION, stream=True, **_few(40)))
    _until(lambda: spoiler.open == 0 and remote.stats().running == 0)
    spoiler.fault = ""
    assert ask(remote).status_code == 200


def test_who_goes_away_ends_the_work_below(remote: Served, spoiler: Spoiler) -> None:
    spoiler.fault = "hang"
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{remote.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # held: who drops it has gone away already
        next(lines)
        _until(lambda: spoiler.open == 1)
    _until(lambda: spoiler.open == 0 and remote.stats().running == 0)


def _until(true: Any) -> None:
    waiter = threading.Event()
    for _ in range(600):
        if true():
            return
        waiter.wait(0.05)
    pytest.fail("it never came")
