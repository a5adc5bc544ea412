"""Legacy completions around a scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_stand_in import EOS, ScriptedEngine, events, serving

from thinkfold.server.logprobs import TextPosition, legacy_logprobs
from thinkfold.types import Phase, TokenLogprobs

SCRIPT = (("<think>", "w", "</think>", "A", "B", EOS),)


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "tiny", "prompt": "q", **body})


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("q", ["q"]), (["q", "r"], ["q", "r"]), ([1, 2], None), ([[1], [2, 3]], None), ("<|im_end|>x", ["<|im_end|>x"])],
)
async def test_every_form_of_prompt(prompt: Any, shown: list[str] | None) -> None:
    engine = ScriptedEngine(SCRIPT)
    async with serving(engine) as client:
        reply = (await complete(client, prompt=prompt, n=2)).json()
    prompts = [call.prompt for call in engine.calls]
    wanted = shown or [engine.tokenizer.decode(ids) for ids in (prompt if isinstance(prompt[0], list) else [prompt])]
    assert prompts == wanted
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(prompts)))
    assert {(c["text"], c["reasoning"], c["finish_reason"]) for c in reply["choices"]} == {("AB", "w", "stop")}
    assert reply["usage"]["completion_tokens"] == 12 * len(prompts)


async def test_streams_of_several_prompts() -> None:
    async with serving(ScriptedEngine(SCRIPT)) as client:
        chunks = events(await complete(client, prompt=["q", "r"], stream=True, stream_options={"include_usage": True}))
        whole = (await complete(client, prompt=["q", "r"])).json()
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "AB", 1: "AB"} and chunks[-1]["usage"] == whole["usage"]


async def test_logprobs() -> None:
    async with serving(ScriptedEngine((("A", "é", EOS),))) as client:
        whole = (await complete(client, logprobs=2)).json()["choices"][0]["logprobs"]
        chunks = events(await complete(client, logprobs=2, stream=True))
    assert whole["tokens"][0] == "A" and whole["token_logprobs"] == [-0.5] * 2
    assert whole["top_logprobs"][0]["A"] == -0.5 and whole["text_offset"][:2] == [0, 1]
    parts = [ch["logprobs"] for c in chunks for ch in c["choices"] if ch["logprobs"]]
    for key, values in whole.items():
        assert [v for part in parts for v in part[key]] == values


def test_text_offsets_count_characters_not_tokens() -> None:
    pieces = [b"a", b"\xe6", b"\xbc\xa2", b"b", b"c"]
    items = [TokenLogprobs(i, -0.5, (), Phase.ANSWER) for i in range(len(pieces))]
    position = TextPosition()
    shown = [legacy_logprobs(part, 0, pieces.__getitem__, position) for part in (items[:2], items[2:])]
    assert [offset for part in shown for offset in part["text_offset"]] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"messages": []}, "messages"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["q"] * 1000}, "prompt"),
        ({"prompt": "x" * 5_000_000}, "prompt"),
        ({"prompt": [1] * 5000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"thinking_budgets": 5}, "thinking_budgets"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(SCRIPT)
    async with serving(engine) as client:
        reply = await complete(client, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].split("[")[0] == param and not engine.calls


async def test_case_19_budget_on_the_legacy_route() -> None:
    engine = ScriptedEngine(SCRIPT)
    async with serving(engine) as client:
        reply = (await complete(client, thinking_token_budget=5)).json()
    assert engine.calls[0].thinking.thinking_token_budget == 5
    assert reply["thinkfold"]["policy"]["thinking"]["budget"] == 5
