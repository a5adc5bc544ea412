"""Chat completions around a scripted engine: the shape of replies, streamed and whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from server_stand_in import EOS, LOOP, ScriptedEngine, chat, events, eventually, join, serving
from tiny_tokenizer import EFFORT_TEMPLATE, OPEN_TEMPLATE, PLAIN_TEMPLATE

FIVE = (*"aaaaa", "</think>", "A", "B", EOS)
THREE_SCRIPTS = (("a", "</think>", "A", EOS), ("b", "b", "b", "</think>", "B", EOS), ("c",) * 6)


async def both_ways(engine: ScriptedEngine, **body: Any) -> tuple[str | None, str, str, dict[str, Any]]:
    """(R, C, FR, usage), after checking that stream and non-stream agree."""
    async with serving(engine) as client:
        whole = (await chat(client, **body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await chat(client, **body, **options))
    choice, streamed = whole["choices"][0], join(chunks)[0]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    assert (message["reasoning"] or "", message["content"]) == (streamed.reasoning, streamed.content)
    assert streamed.finish_reasons == [choice["finish_reason"]]
    assert streamed.thinking_end_reason == choice["thinking_end_reason"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["thinkfold"] == whole["thinkfold"]
    return message["reasoning"], message["content"], choice["finish_reason"], whole["usage"]


@pytest.mark.parametrize(
    ("template", "prefill", "script", "want"),
    [
        (OPEN_TEMPLATE, None, ("w", "</think>", "A", EOS), ("w", "A")),
        (None, None, ("<think>", "w", "</think>", "A", EOS), ("w", "A")),
        (None, "<think>p</think>", ("A", "B", EOS), (None, "AB")),
        (None, "<think>p", ("w", "</think>", "A", EOS), ("w", "A")),
    ],
)
async def test_case_4_start_state_comes_from_the_prompt_tail(
    template: str | None, prefill: str | None, script: tuple[str, ...], want: tuple[str | None, str]
) -> None:
    engine = ScriptedEngine((script,), **({"template": template} if template else {}))
    messages = [{"role": "user", "content": "q"}]
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    reasoning, content, finish, _ = await both_ways(engine, messages=messages)
    assert (reasoning, content, finish) == (*want, "stop")


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"reasoning_effort": "none"}, "server", "no switch"])
async def test_case_6_thinking_off_leaves_nothing_in_the_thinking_field(off: Any) -> None:
    engine = ScriptedEngine((("A", EOS),))
    if off == "server":
        engine.config = type(engine.config)(served_model_name="tiny", enable_thinking=False)
    elif off == "no switch":
        engine = ScriptedEngine((("A", EOS),), template=PLAIN_TEMPLATE)
    reasoning, content, _, usage = await both_ways(engine, **(off if isinstance(off, dict) else {}))
    assert (reasoning, content) == (None, "A")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    closed = engine.calls[0].prompt.endswith("<think>\n\n</think>\n\n")
    assert closed == (off != "no switch")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_case_11_choices_share_no_state(order: tuple[int, ...]) -> None:
    alone = []
    for script in THREE_SCRIPTS:
        async with serving(ScriptedEngine((script,), template=OPEN_TEMPLATE)) as client:
            alone.append(join(events(await chat(client, stream=True, max_tokens=6)))[0])
    engine = ScriptedEngine(THREE_SCRIPTS, template=OPEN_TEMPLATE, order=[i for i in order for _ in range(6)])
    async with serving(engine) as client:
        together = join(events(await chat(client, stream=True, n=3, max_tokens=6)))
    assert [together[i] for i in range(3)] == alone
    assert together[2].thinking_end_reason == "unclosed" and together[2].finish_reasons == ["length"]


async def test_case_32_usage() -> None:
    _, content, _, usage = await both_ways(ScriptedEngine((FIVE,), template=OPEN_TEMPLATE))
    assert content == "AB"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert usage["completion_tokens"] == 9 and usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 9
    *_, three = await both_ways(ScriptedEngine((FIVE,), template=OPEN_TEMPLATE), n=3)
    assert three["completion_tokens"] == 27 and three["prompt_tokens"] == usage["prompt_tokens"]


async def test_the_policy_comes_last_in_a_stream_without_usage() -> None:
    async with serving(ScriptedEngine((FIVE,), template=OPEN_TEMPLATE)) as client:
        chunks = events(await chat(client, stream=True, n=2, thinking_token_budget=9))
    assert all("usage" not in chunk for chunk in chunks)
    assert [i for i, chunk in enumerate(chunks) if "thinkfold" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["thinkfold"]["policy"]["thinking"]["budget"] == 9
    assert chunks[-1]["thinkfold"]["policy"]["fold"]["policy"] == "pressure"


async def test_first_chunks_open_every_choice() -> None:
    async with serving(ScriptedEngine()) as client:
        chunks = events(await chat(client, stream=True, n=2))
    assert [c["choices"][0]["delta"] for c in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert {c["id"] for c in chunks} == {chunks[0]["id"]} and chunks[0]["object"] == "chat.completion.chunk"


async def test_logprobs_in_chat() -> None:
    body = {"logprobs": True, "top_logprobs": 2}
    async with serving(ScriptedEngine((("A", "x", EOS),))) as client:
        whole = (await chat(client, **body)).json()["choices"][0]["logprobs"]
        chunks = events(await chat(client, stream=True, **body))
    streamed = [e for c in chunks for ch in c["choices"] if ch["logprobs"] for e in ch["logprobs"]["content"]]
    assert streamed == whole["content"]
    first = whole["content"][0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("A", [65], -0.5)
    assert first["top_logprobs"][1]["logprob"] == -9999.0
    assert [e["token"] for e in whole["content"]] == ["A", "x"]
    assert whole["reasoning"] == []


async def test_logprobs_are_kept_apart_by_phase() -> None:
    async with serving(ScriptedEngine((("<think>", "w", "</think>", "A", EOS),))) as client:
        whole = (await chat(client, logprobs=True)).json()["choices"][0]["logprobs"]
    assert [e["token"] for e in whole["content"]] == ["A"]
    assert [e["token"] for e in whole["reasoning"]] == ["w"]


async def test_keep_alive_comments_while_nothing_happens() -> None:
    import asyncio

    from thinkfold.server.state import ServerOptions

    engine = ScriptedEngine(gate=asyncio.Event())
    async with serving(engine, ServerOptions(keepalive_s=0.01)) as client:
        reply = asyncio.create_task(chat(client, stream=True))
        await eventually(lambda: engine.running == 1)
        asyncio.get_running_loop().call_later(0.1, engine.gate.set)
        text = (await reply).text
    assert text.count(": keep-alive\n\n") >= 2 and text.endswith("data: [DONE]\n\n")
    assert text.index("assistant") < text.index(": keep-alive")


async def test_a_request_that_fails_later_ends_its_stream_with_one_error() -> None:
    async with serving(ScriptedEngine(((*"aaaa", EOS),), fail_after=2)) as client:
        whole = await chat(client)
        chunks = events(await chat(client, stream=True))
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "request_failed"
    assert chunks[-1]["error"]["message"] == "the row failed"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("error") == 1


async def test_sampling_reaches_the_engine() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        reply = await chat(
            client, temperature=0, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=1,
            frequency_penalty=-1, logit_bias={"5": 2}, max_completion_tokens=9, min_tokens=2, stop=["x", "y"],
            stop_token_ids=[3], stop_in_thinking=True, ignore_eos=True, seed=-4, user="u", metadata={"a": "b"},
            cache_salt="acme", prompt_cache_key="k", eos_in_thinking="stop", max_thinking_tokens=4,
        )  # fmt: skip
    assert reply.status_code == 200, reply.text
    call = engine.calls[0]
    assert call.namespace == ("salt=acme", "key=k")
    assert (call.thinking.thinking_token_budget, call.thinking.eos_in_thinking) == (4, "stop")
    got = call.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0, 0.5, 7, 0.1, 1.1)
    assert (got.presence_penalty, got.frequency_penalty, got.logit_bias) == (1, -1, {5: 2})
    assert (got.max_tokens, got.min_tokens, got.stop, got.stop_token_ids) == (9, 2, ("x", "y"), (3,))
    assert (got.stop_in_thinking, got.ignore_eos, got.seed) == (True, True, -4)


async def test_defaults_come_from_generation_config(tmp_path: Any) -> None:
    engine = ScriptedEngine()
    engine.tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 1}')
    async with serving(engine) as client:
        await chat(client)
        await chat(client, temperature=1.5)
        shown = (await client.get("/v1/models/tiny")).json()["thinkfold"]["sampling_defaults"]
    assert [(c.sampling.temperature, c.sampling.top_k) for c in engine.calls] == [(0.6, 20), (1.5, 20)]
    assert shown == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "high"}),
        ("/v1/responses", {"input": "q", "reasoning": {"effort": "high"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "q"}], "thinking": {"type": "adaptive"}}),
    ],
)
async def test_a_template_that_takes_the_effort_is_told_it(path: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine(template=EFFORT_TEMPLATE)
    async with serving(engine) as client:
        assert (await client.post(path, json={"max_tokens": 9, **body} if "messages" in body else body)).is_success
    assert "Reasoning: high" in engine.calls[0].prompt


async def test_case_54_effort_is_honoured_and_echoed() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
            reply = await chat(client, reasoning_effort=effort)
            assert reply.status_code == 200
            assert reply.json()["thinkfold"]["policy"]["thinking"]["source"] == "reasoning_effort"
        beaten = (await chat(client, reasoning_effort="none", thinking_token_budget=7)).json()
        for bad in ("banana", 3, {}):
            refused = await chat(client, reasoning_effort=bad)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "reasoning_effort" and "minimal" in error["message"]
    assert beaten["thinkfold"]["policy"]["thinking"]["budget"] == 7
    assert engine.calls[0].prompt.endswith("</think>\n\n") and not engine.calls[-1].prompt.endswith("</think>\n\n")


async def test_case_26_stops_sleep_in_thinking_unless_asked() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        await chat(client, stop="=")
        await chat(client, stop=["="], stop_in_thinking=True)
    assert [(c.sampling.stop, c.sampling.stop_in_thinking) for c in engine.calls] == [(("=",), False), (("=",), True)]


async def test_loop_ends_by_length() -> None:
    *_, finish, usage = await both_ways(ScriptedEngine((LOOP,), template=OPEN_TEMPLATE), max_tokens=8)
    assert finish == "length" and usage["completion_tokens"] == 8
