"""Folding over HTTP: what may be asked, what is echoed, what a stream and the log tell of it."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import httpx
import openai
import pytest
from server_stand_in import EOS, ScriptedEngine, chat, chat_body, events, serving
from tiny_tokenizer import OPEN_TEMPLATE, QWEN_TEMPLATE

from thinkfold.config import EngineConfig
from thinkfold.errors import CapacityError
from thinkfold.server.folds import segment_states
from thinkfold.types import Fold, FoldParams, Segment

SCRIPT = ((*"aaaa", "</think>", "A", EOS),)
TOLD = {
    1: [Segment(0, 0, 160), Segment(1, 160, 330)],
    2: [Fold(0, 0, 144, 32.0, 7, 0.125)],
    5: [Fold(1, 144, 320, 0.0, 0, math.nan, refused=True)],
}
FOLDS = [
    {"choice": 0, "id": 0, "segment": 0, "start": 0, "end": 144, "entries": 32.0, "pages_freed": 7, "error": 0.125,
     "refused": False, "quantised": False},
    {"choice": 0, "id": 1, "segment": 1, "start": 144, "end": 320, "entries": 0.0, "pages_freed": 0, "error": None,
     "refused": True, "quantised": False},
]  # fmt: skip


def folding() -> ScriptedEngine:
    return ScriptedEngine(SCRIPT, template=OPEN_TEMPLATE, told=TOLD)


async def test_the_wish_reaches_the_engine_and_the_policy_comes_back() -> None:
    wish = {
        "policy": "eager", "profile": "fine", "selector": "drop", "entries": 9, "gate": 1, "at_answer": "recycle",
        "prefer": "queue", "delimiter_token": ".", "delimiter_regex": "^Wait",
    }  # fmt: skip
    engine = folding()
    async with serving(engine) as client:
        reply = (await chat(client, thinkfold={"fold": wish})).json()
        bare = (await chat(client)).json()
        empty = (await chat(client, thinkfold={"fold": {"policy": None}})).json()
        raw = {"model": "tiny", "prompt": "q", "thinkfold": {"fold": wish}}
        completion = (await client.post("/v1/completions", json=raw)).json()
    assert engine.calls[0].fold == FoldParams(**wish)
    assert engine.calls[1].fold is None and engine.calls[2].fold == FoldParams()
    assert reply["thinkfold"]["policy"]["fold"] == completion["thinkfold"]["policy"]["fold"] == wish
    assert bare["thinkfold"]["policy"] == empty["thinkfold"]["policy"]
    assert bare["thinkfold"]["policy"]["fold"]["policy"] == "pressure"
    assert set(reply["thinkfold"]) == {"policy", "segments"}


async def test_thinking_may_be_recycled_at_the_answer_with_folding_off() -> None:
    async with serving(folding()) as client:
        reply = await chat(client, thinkfold={"fold": {"policy": "off", "at_answer": "recycle"}})
    policy = reply.json()["thinkfold"]["policy"]["fold"]
    assert (policy["policy"], policy["at_answer"]) == ("off", "recycle")


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("thinkfold", "param"),
    [
        ({"fold": {"polcy": "eager"}}, "thinkfold.fold.polcy"),
        ({"fold": {"policy": "always"}}, "thinkfold.fold.policy"),
        ({"fold": {"policy": False}}, "thinkfold.fold.policy"),
        ({"fold": {"profile": "huge"}}, "thinkfold.fold.profile"),
        ({"fold": {"selector": "dorp"}}, "thinkfold.fold.selector"),
        ({"fold": {"selector": 7}}, "thinkfold.fold.selector"),
        ({"fold": {"entries": -1}}, "thinkfold.fold.entries"),
        ({"fold": {"entries": 1.5}}, "thinkfold.fold.entries"),
        ({"fold": {"entries": 10**9}}, "thinkfold.fold.entries"),
        ({"fold": {"entries": 128}}, "thinkfold.fold.entries"),
        ({"fold": {"gate": 1.5}}, "thinkfold.fold.gate"),
        ({"fold": {"gate": True}}, "thinkfold.fold.gate"),
        ({"fold": {"at_answer": "swap"}}, "thinkfold.fold.at_answer"),
        ({"fold": {"prefer": "speed"}}, "thinkfold.fold.prefer"),
        ({"fold": {"delimiter_regex": "a(?!b)"}}, "thinkfold.fold.delimiter_regex"),
        ({"fold": {"delimiter_regex": "x" * 257}}, "thinkfold.fold.delimiter_regex"),
        ({"fold": {"delimiter_token": 5}}, "thinkfold.fold.delimiter_token"),
        ({"fold": "eager"}, "thinkfold.fold"),
        ({"tier": "gold"}, "thinkfold.tier"),
        ({"events": True}, "thinkfold.events"),
        ({"events": 1}, "thinkfold.events"),
        ("eager", "thinkfold"),
    ],
)
async def test_refusals_name_the_field(path: str, thinkfold: Any, param: str) -> None:
    body = {"model": "tiny", "thinkfold": thinkfold}
    body |= {"messages": [{"role": "user", "content": "q"}]} if path.startswith("chat") else {"prompt": "q"}
    async with serving(folding()) as client:
        reply = await client.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param and param in error["message"]
        assert (await chat(client)).status_code == 200


async def test_costs_stand_in_usage() -> None:
    async with serving(folding()) as client:
        whole = (await chat(client)).json()["usage"]
        chunks = events(await chat(client, stream=True, stream_options={"include_usage": True}))
    spent = whole["thinkfold"]
    assert set(spent) == {"tokens", "kv", "time", "folds", "folds_refused", "folded_tokens", "quantised_tokens"}
    assert (spent["folds"], spent["folds_refused"], spent["folded_tokens"]) == (3, 1, 48)
    assert spent["tokens"]["prompt"] == whole["prompt_tokens"] and spent["tokens"]["cached"] == 2
    assert set(spent["kv"]) == {"byte_seconds", "peak_entries", "swapped_bytes", "preemptions"}
    assert set(spent["time"]) == {"queue_s", "prefill_s", "thinking_s", "answer_s", "paused_s", "device_s"}
    assert chunks[-1]["usage"] == whole


async def test_segments_come_last_with_their_state() -> None:
    async with serving(folding()) as client:
        whole = (await chat(client, n=2)).json()["thinkfold"]["segments"]
        streamed = events(await chat(client, stream=True))[-1]["thinkfold"]["segments"]
    assert [(s["choice"], s["id"], s["state"]) for s in whole] == [
        (0, 0, "folded"), (0, 1, "raw"), (1, 0, "folded"), (1, 1, "raw"),
    ]  # fmt: skip
    assert streamed == whole[:2] and streamed[0] | {"state": ""} == {
        "choice": 0, "id": 0, "start": 0, "end": 160, "state": "",
    }  # fmt: skip


def test_a_segment_is_folded_when_most_of_it_is() -> None:
    segments = [Segment(i, 100 * i, 100 * (i + 1)) for i in range(5)]
    folds = [Fold(0, 0, 96, 8, 5, 0.1), Fold(1, 96, 192, 8, 5, 0.9, refused=True), Fold(2, 96, 384, 8, 5, 0.1)]
    states = [s["state"] for s in segment_states(0, segments, folds)]
    assert states == ["folded", "folded", "folded", "folded", "closed"]
    assert [s["state"] for s in segment_states(0, segments, folds[:2])] == ["folded", "raw", *["closed"] * 3]
    whole = [Fold(i, start, start + 96, 96, 3, 0.01, quantised=True) for i, start in ((3, 0), (4, 300))]
    states = [s["state"] for s in segment_states(0, segments, [*whole, *folds[:2]])]
    assert states == ["folded", "raw", "closed", "quantised", "closed"], "a fold follows, and is what counts"
    assert segment_states(0, [], folds) == []


def named(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """(event name, data) of each event of a stream."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, lines = "", block.split("\n")
        if lines[0].startswith("event: "):
            name, *lines = lines[0].removeprefix("event: "), *lines[1:]
        assert len(lines) == 1 and lines[0].startswith("data: ")
        if lines[0] != "data: [DONE]":
            found.append((name, json.loads(lines[0].removeprefix("data: "))))
    return found


async def test_fold_events_come_only_when_asked_for() -> None:
    async with serving(folding()) as client:
        asked = named(await chat(client, stream=True, thinkfold={"events": True}))
        plain = await chat(client, stream=True)
        body = {"model": "tiny", "prompt": "q", "stream": True, "thinkfold": {"events": True}}
        completion = named(await client.post("/v1/completions", json=body))
    for stream in (asked, completion):
        told = [data for name, data in stream if name == "thinkfold.fold"]
        assert [data["thinkfold"]["fold"] for data in told] == FOLDS
        assert all(data["choices"] == [] and data["id"] == stream[0][1]["id"] for data in told)
    assert "event:" not in plain.text and '"fold":{"choice"' not in plain.text
    assert [d["choices"] for n, d in asked if not n] == [d["choices"] for _, d in named(plain)]


@pytest.mark.parametrize("usage", [False, True])
async def test_the_openai_client_reads_a_stream_with_fold_events(usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    async with serving(folding()) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="unused", http_client=http, max_retries=0)
        body: dict[str, Any] = {**chat_body(), **options, "extra_body": {"thinkfold": {"events": True}}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
        async with client.chat.completions.stream(**body) as stream:
            final = await stream.get_final_completion()
        raw = {"model": "tiny", "prompt": "q", "extra_body": body["extra_body"]}
        texts = [
            c.text for ch in [x async for x in await client.completions.create(**raw, stream=True)] for c in ch.choices
        ]
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "A"
    told = [(c.model_extra or {}).get("thinkfold", {}).get("fold") for c in chunks]
    assert [fold for fold in told if fold] == FOLDS
    assert final.choices[0].message.content == "A" and "".join(texts).endswith("A")
    if usage:
        assert chunks[-1].usage.model_extra["thinkfold"]["folds"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_each_fold_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "thinkfold.server.folds"):
        async with serving(folding()) as client:
            reply = await chat(client, stream=stream)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "thinkfold.server.folds"]
    request = named(reply)[0][1]["id"] if stream else reply.json()["id"]
    assert lines == [{"event": "thinkfold.fold", "request": request, **fold} for fold in FOLDS]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_is_too_long_for_the_engine_names_its_messages(stream: bool) -> None:
    engine = ScriptedEngine(refuse=CapacityError("prompt", "70 tokens leave no room: this engine holds 64"))
    async with serving(engine) as client:
        error = (await chat(client, stream=stream)).json()["error"]
        raw = (await client.post("/v1/completions", json={"prompt": "q", "stream": stream})).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "capacity_exceeded") and "70 tokens" in error["message"]
    assert (raw["param"], raw["code"]) == ("prompt", "capacity_exceeded")


async def test_more_prompts_than_the_queue_can_ever_hold_are_no_matter_of_waiting() -> None:
    config = EngineConfig(served_model_name="tiny", max_num_seqs=2, max_waiting=3)
    engine = ScriptedEngine(config=config)
    async with serving(engine) as client:
        for prompts, n, status in ((5, 1, 200), (6, 1, 400), (2, 2, 200), (3, 2, 400), (1, 8, 200)):
            reply = await client.post("/v1/completions", json={"prompt": ["q"] * prompts, "n": n})
            assert reply.status_code == status, (prompts, n, reply.text)
            if status == 400:
                error = reply.json()["error"]
                assert (error["param"], error["code"]) == ("prompt", "capacity_exceeded") and "5" in error["message"]


NAMELESS = QWEN_TEMPLATE.replace("(' ' + m.name if m.name else '')", "''")


async def test_names_of_messages_are_rendered_or_refused() -> None:
    named_user = [{"role": "user", "content": "q", "name": "Ann"}]
    engine = ScriptedEngine()
    async with serving(engine) as client:
        assert (await chat(client, messages=named_user)).status_code == 200
        tool = [*named_user, {"role": "assistant", "content": "a", "name": "Bob"}, {"role": "user", "content": "q"}]
        shown = (await chat(client, messages=tool)).json()["error"]
    assert "user Ann" in engine.calls[0].prompt
    assert shown["param"] == "messages[1].name" and shown["code"] == "unsupported_value"
    async with serving(ScriptedEngine(template=NAMELESS)) as client:
        error = (await chat(client, messages=named_user)).json()["error"]
        assert error["param"] == "messages[0].name"
        assert (await chat(client, messages=[{"role": "user", "content": "q", "name": None}])).status_code == 200
