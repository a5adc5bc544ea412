"""Chats over a real socket: the next turn is computed ahead, prefixes are pinned, with Pebble's real weights."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import Served, run_server

from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import ParameterError
from thinkfold.server.prefixes import read_warm_file, warm

SHORT = {"thinking_token_budget": 16}  # what is thought matters to no test here
MEMORY = 64 * 1024 * 1024
PAGE = 8
SYSTEM = {"role": "system", "content": "You are asked to reckon. " * 12}
SHOWN = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]


@pytest.fixture(scope="module")
def pebble() -> Iterator[Served]:
    yield from run_server(EngineConfig(max_model_len=2048, max_num_seqs=4, page_size=PAGE, kv_cache_bytes=MEMORY))


@pytest.fixture
def client(pebble: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pebble.url, timeout=60) as client:
        yield client


def settled(served: Served, computed: int) -> int:
    """Wait until something more was computed ahead; tokens so far."""
    for _ in range(600):
        if served.stats().ahead_tokens > computed:
            return served.stats().ahead_tokens
        threading.Event().wait(0.05)
    raise AssertionError("nothing was computed ahead")


def ask(client: httpx.Client, api: str, chat: list[dict[str, str]], salt: str) -> tuple[str, int, int]:
    """Text, prompt tokens and cached tokens of a reply; of a stream for chat completions."""
    body = {"model": "pebble", "temperature": 0, "cache_salt": salt}
    if api != "messages":
        body |= SHORT
    if api == "chat":
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        reply = client.post("/v1/chat/completions", json={**body, **stream, "messages": chat, "max_tokens": 400})
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
        usage = chunks[-1]["usage"]
        return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if api == "responses":
        reply = client.post("/v1/responses", json={**body, "input": chat, "max_output_tokens": 400}).json()
        text = reply["output"][-1]["content"][0]["text"]
        usage = reply["usage"]
        return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    thinking = {"type": "enabled", "budget_tokens": SHORT["thinking_token_budget"]}
    reply = client.post("/v1/messages", json={**body, "messages": chat, "max_tokens": 400, "thinking": thinking}).json()
    usage = reply["usage"]
    cached = usage["cache_read_input_tokens"]
    return reply["content"][-1]["text"], usage["input_tokens"] + cached, cached


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_case_35_the_next_turn_of_a_real_chat_is_found_whole(pebble: Served, client: httpx.Client, api: str) -> None:
    chat, foreseen = [{"role": "user", "content": "What is 12 + 30?"}], 0
    for turn in range(3):
        computed = pebble.stats().ahead_tokens
        text, prompt, cached = ask(client, api, chat, api)
        settled(pebble, computed)
        assert cached == foreseen // PAGE * PAGE
        assert prompt - cached < PAGE + 40, "only the question is left"
        chat += [{"role": "assistant", "content": text}]
        foreseen = len(pebble.engine.prompts.encode_history(chat))
        chat += [{"role": "user", "content": f"And {turn} + 5?"}]
    assert client.get("/v1/thinkfold/prefixes").json()["data"][0]["ahead"]


def test_a_changed_system_prompt_is_told_with_what_it_cost(client: httpx.Client) -> None:
    body = {"model": "pebble", "temperature": 0, "max_tokens": 400, "cache_salt": "drift", **SHORT}

    def reply(system: str, *chat: str) -> tuple[dict[str, int], dict[str, object]]:
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat)]
        chatted = {**body, "messages": [{"role": "system", "content": system}, *said]}
        answer = client.post("/v1/chat/completions", json=chatted).json()
        return answer["usage"]["thinkfold"]["tokens"], answer["thinkfold"]

    asked = SYSTEM["content"]
    first, _ = reply(asked, "What is 2 + 3?")
    kept, told = reply(asked, "What is 2 + 3?", "5", "And 4 + 4?")
    assert kept["cached"] > first["prompt"] - 2 * PAGE and "drift" not in told
    lost, told = reply(asked.replace("asked", "told", 2), "What is 2 + 3?", "5", "And 4 + 4?", "8", "And 1 + 1?")
    tokens = kept["prompt"] - lost["cached"]
    assert tokens > 64
    where = {"kind": "system", "message": 0, "role": "system", "character": asked.index("asked")}
    assert told["drift"] == {**where, "tokens_lost": tokens}


def test_half_an_answer_is_not_computed_ahead(pebble: Served, client: httpx.Client) -> None:
    before = pebble.stats().ahead_tokens
    body = {"model": "pebble", "messages": SHOWN[:1], "temperature": 0, **SHORT}
    client.post("/v1/chat/completions", json={**body, "max_tokens": 3})
    client.post("/v1/chat/completions", json={**body, "max_tokens": 400, "n": 2, "temperature": 1})
    client.post("/v1/completions", json={"model": "pebble", "prompt": "1 + 1 =", "max_tokens": 4})
    assert pebble.stats().ahead_tokens == before


def test_pinned_prefixes_are_shown_found_and_let_go(pebble: Served, client: httpx.Client) -> None:
    posted = client.post("/v1/thinkfold/prefixes", json={"name": "shots", "messages": [SYSTEM, *SHOWN]}).json()
    assert posted["tokens"] == posted["pages"] * PAGE > 64
    assert posted["computed_tokens"] == posted["tokens"]
    again = client.post("/v1/thinkfold/prefixes", json={"name": "shots", "messages": [SYSTEM, *SHOWN]}).json()
    assert (again["tokens"], again["computed_tokens"]) == (posted["tokens"], 0)
    listed = [p for p in client.get("/v1/thinkfold/prefixes").json()["data"] if not p["ahead"]]
    assert [(p["name"], p["tokens"]) for p in listed] == [("shots", posted["tokens"])]
    chat = [SYSTEM, *SHOWN, {"role": "user", "content": "What is 4 + 4?"}]
    reply = client.post("/v1/chat/completions", json={"model": "pebble", "messages": chat, "max_tokens": 2}).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == posted["tokens"]
    assert client.delete("/v1/thinkfold/prefixes/shots").json()["deleted"]
    assert client.delete("/v1/thinkfold/prefixes/shots").status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "x"}, "messages"),
        ({"name": "x", "messages": [SYSTEM], "prompt": "p"}, "messages"),
        ({"name": "x", "messages": SHOWN[:1]}, "messages"),
        ({"name": "a/b", "prompt": "p"}, "name"),
        ({"name": "x", "prompt": "p", "ttl_s": 0}, "ttl_s"),
        ({"name": "x", "prompt": "p " * 3000}, "prefix"),
        ({"name": "x", "prompt": "p", "ttl": 3}, "ttl"),
    ],
)
def test_a_wrong_prefix_is_refused_by_name(client: httpx.Client, body: dict[str, object], field: str) -> None:
    reply = client.post("/v1/thinkfold/prefixes", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


def test_the_warm_file_pins_for_each_tenant(pebble: Served, tmp_path: Path) -> None:
    file = tmp_path / "warm.json"
    entries = [{"name": "s", "tenant": t, "messages": [SYSTEM]} for t in ("a", "b")]
    file.write_text(json.dumps({"prefixes": entries}))

    async def start() -> list[list[tuple[str, int]]]:
        engine = await AsyncEngine.start(EngineConfig(max_model_len=512, page_size=PAGE, kv_cache_bytes=MEMORY // 8))
        try:
            await warm(engine, read_warm_file(str(file)))
            return [[(p.name, p.tokens > 50) for p in await engine.pinned(t)] for t in ("a", "b", "")]
        finally:
            await engine.stop()

    assert asyncio.run(start()) == [[("s", True)], [("s", True)], []]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[", "not valid JSON"),
        ('{"prefixes": [{"name": "s"}]}', r"prefixes\[0\].messages"),
        ('{"prefixes": [{"name": "s", "prompt": "p"}, {"name": "s", "prompt": "q"}]}', r"prefixes\[1\].name"),
        ('{"prefixes": [{"name": "s", "text": "p"}]}', r"prefixes\[0\].text"),
    ],
)
def test_a_wrong_warm_file_says_where(tmp_path: Path, text: str, where: str) -> None:
    file = tmp_path / "warm.json"
    file.write_text(text)
    with pytest.raises(ParameterError, match=where):
        read_warm_file(str(file))
    with pytest.raises(ParameterError, match="cannot read"):
        read_warm_file(str(tmp_path / "none.json"))
