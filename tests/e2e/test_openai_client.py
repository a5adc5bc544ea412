"""The OpenAI client against the real engine: what streams equals what does not, and budgets hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from conftest import Served

# A prefill that opens thinking: random weights do not think by themselves.
OPEN = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "<think>So"}]
PLAIN = OPEN[:1]
GREEDY: dict[str, Any] = {"model": "pebble", "temperature": 0}


@dataclass
class Choice:
    reasoning: str = ""
    content: str = ""
    finish_reason: str | None = None
    thinking_end_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)


def from_stream(chunks: Iterable[Any]) -> tuple[dict[int, Choice], Any]:
    choices: dict[int, Choice] = {}
    last = None
    for chunk in chunks:
        last = chunk
        for choice in chunk.choices:
            into = choices.setdefault(choice.index, Choice())
            into.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            into.content += choice.delta.content or ""
            into.finish_reason = choice.finish_reason or into.finish_reason
            into.thinking_end_reason = getattr(choice, "thinking_end_reason", None) or into.thinking_end_reason
            into.logprobs += choice.logprobs.content if choice.logprobs else []
    return choices, last


def from_whole(reply: Any) -> dict[int, Choice]:
    return {
        c.index: Choice(
            c.message.reasoning or "",
            c.message.content,
            c.finish_reason,
            c.thinking_end_reason,
            list(c.logprobs.content) if c.logprobs else [],
        )
        for c in reply.choices
    }


def both(client: openai.OpenAI, **body: Any) -> tuple[dict[int, Choice], Any]:
    """The reply of a request, after checking that its stream says the same."""
    whole = client.chat.completions.create(**body)
    stream = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    choices, last = from_stream(stream)
    assert choices == from_whole(whole)
    ours, theirs = whole.usage.model_dump(), last.usage.model_dump()
    for usage in (ours, theirs):
        usage.pop("prompt_tokens_details")  # the second run may find the first one's prefix
        assert usage.pop("thinkfold")["tokens"]["prompt"] == usage["prompt_tokens"]  # times differ
    assert ours == theirs
    return choices, whole


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    choices, reply = both(client, **GREEDY, messages=PLAIN, max_tokens=12)
    assert choices[0].content and not choices[0].reasoning and choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 12
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("budget", [4, 5, 9])
def test_case_19_budgets_are_enforced_and_echoed(client: openai.OpenAI, budget: int) -> None:
    body = {**GREEDY, "messages": OPEN, "max_tokens": 40, "extra_body": {"thinking_token_budget": budget}}
    choices, reply = both(client, **body)
    # The prefilled thinking counts as well, so at most `budget` tokens are generated.
    assert reply.usage.completion_tokens_details.reasoning_tokens <= budget
    assert choices[0].thinking_end_reason == "budget" and choices[0].content
    assert reply.thinkfold["policy"]["thinking"]["budget"] == budget
    assert reply.thinkfold["policy"]["thinking"]["source"] == "thinking_token_budget"


def test_case_4_prefills(client: openai.OpenAI) -> None:
    closed = [PLAIN[0], {"role": "assistant", "content": "<think>So</think>"}]
    answer, _ = both(client, **GREEDY, messages=closed, max_tokens=6)
    assert not answer[0].reasoning and answer[0].content
    thinking, _ = both(client, **GREEDY, messages=OPEN, max_tokens=6)
    assert thinking[0].reasoning and not thinking[0].content
    assert thinking[0].thinking_end_reason == "unclosed"


@pytest.mark.parametrize("none", [{"thinking_token_budget": 0}, {"reasoning_effort": "none"}])
def test_case_18_no_budget_closes_prefilled_thinking_at_once(client: openai.OpenAI, none: dict[str, Any]) -> None:
    choices, reply = both(client, **GREEDY, messages=OPEN, max_tokens=8, extra_body=none)
    assert choices[0].content and not choices[0].reasoning
    assert choices[0].thinking_end_reason == "budget"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    with pytest.raises(openai.BadRequestError, match="switched off"):
        client.chat.completions.create(**GREEDY, messages=OPEN, max_tokens=8, extra_body={"enable_thinking": False})


def test_equal_greedy_choices_are_computed_once(client: openai.OpenAI) -> None:
    one, _ = both(client, **GREEDY, messages=PLAIN, max_tokens=12)
    three, reply = both(client, **GREEDY, messages=PLAIN, max_tokens=12, n=3)
    assert three == dict.fromkeys(range(3), one[0])
    assert reply.usage.completion_tokens == 36
    tokens = reply.usage.thinkfold["tokens"]
    assert (tokens["answer"], tokens["copied"]) == (12, 24)


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_case_6_thinking_off(client: openai.OpenAI, off: dict[str, Any]) -> None:
    choices, reply = both(client, **GREEDY, messages=PLAIN, max_tokens=6, extra_body=off)
    assert choices[0].content and not choices[0].reasoning
    assert reply.thinkfold["policy"]["thinking"]["enabled"] is False
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


def test_case_11_streams_of_three_choices_are_separate(client: openai.OpenAI) -> None:
    body = {"model": "pebble", "messages": OPEN, "temperature": 1.0, "seed": 7, "max_tokens": 30}
    body["extra_body"] = {"thinking_token_budget": 12}
    choices, reply = both(client, **body, n=3)
    assert len(choices) == 3 and len({c.reasoning + c.content for c in choices.values()}) == 3
    alone, _ = both(client, **body)
    assert choices[0] == alone[0]
    assert reply.usage.prompt_tokens == client.chat.completions.create(**body).usage.prompt_tokens


def test_case_32_usage_counts_what_was_generated(client: openai.OpenAI) -> None:
    body = {**GREEDY, "messages": OPEN, "max_tokens": 20, "extra_body": {"thinking_token_budget": 6}}
    _, one = both(client, **body)
    _, three = both(client, **body, n=3)
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert one.usage.completion_tokens_details.reasoning_tokens <= 6


def test_fold_policies_are_echoed_and_a_stream_with_events_is_read(client: openai.OpenAI) -> None:
    wish = {"policy": "eager", "profile": "fine", "entries": 16, "gate": 0.5}
    body = {**GREEDY, "messages": OPEN, "max_tokens": 40, "extra_body": {"thinkfold": {"fold": wish}}}
    _, reply = both(client, **body)
    assert wish.items() <= reply.thinkfold["policy"]["fold"].items()
    body["extra_body"] = {"thinkfold": {"fold": wish, "events": True}}
    choices, last = from_stream(client.chat.completions.create(**body, stream=True))
    assert choices == from_whole(reply)
    assert last.thinkfold["policy"] == reply.thinkfold["policy"]


def test_folds_are_told_while_the_response_runs(served: Served, client: openai.OpenAI) -> None:
    letter, newline = (served.engine.prompts.encode_text(text)[-1] for text in ("a", "\n"))
    body: dict[str, Any] = {
        "model": "pebble", "messages": OPEN, "temperature": 1.0, "seed": 3, "max_tokens": 560,
        "logit_bias": {str(letter): 100, str(newline): 100},  # random weights make blank lines only when pushed
        "extra_body": {"thinkfold": {"fold": {"policy": "eager", "profile": "pebble", "entries": 16}, "events": True}},
    }  # fmt: skip
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    told = [c.thinkfold["fold"] for c in chunks if "fold" in (c.model_extra or {}).get("thinkfold", {})]
    last = chunks[-1]
    assert told and all(fold["entries"] == 16 and not fold["refused"] for fold in told)
    assert last.usage.thinkfold["folds"] == len(told)
    assert last.usage.thinkfold["folded_tokens"] == sum(fold["end"] - fold["start"] for fold in told)
    states = {segment["id"]: segment["state"] for segment in last.thinkfold["segments"]}
    assert {states[fold["segment"]] for fold in told[1:]} == {"folded"}  # most of the first may be left raw
    assert chunks.index(last) > chunks.index(next(c for c in chunks if "thinkfold" in (c.model_extra or {}))) + 1


def test_prefix_hits_are_reported(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "words " * 60}, *PLAIN]
    replies = [client.chat.completions.create(**GREEDY, messages=messages, max_tokens=2) for _ in range(2)]
    assert replies[1].usage.prompt_tokens_details.cached_tokens >= 16
    salted = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=2, extra_body={"cache_salt": "other"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_seeds_repeat(client: openai.OpenAI) -> None:
    body = {"model": "pebble", "messages": PLAIN, "temperature": 1.0, "max_tokens": 16}

    def texts(**more: Any) -> list[str]:
        return [c.message.content for c in client.chat.completions.create(**body, **more).choices]

    assert texts(seed=7, n=4) == texts(seed=7, n=4)
    assert texts(seed=7) == texts(seed=7, n=4)[:1]
    assert texts() != texts()


def test_case_26_stop_strings(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**GREEDY, messages=PLAIN, max_tokens=12).choices[0].message.content
    stop = plain[len(plain) // 2 :][:4]
    choices, _ = both(client, **GREEDY, messages=PLAIN, max_tokens=12, stop=[stop])
    assert choices[0].content == plain[: plain.index(stop)] and choices[0].finish_reason == "stop"
    # Inside thinking the same string does not stop, unless asked to.
    thinking = both(client, **GREEDY, messages=OPEN, max_tokens=12)[0][0].reasoning
    inside = thinking[len(thinking) // 2 :][:3]
    asleep, _ = both(client, **GREEDY, messages=OPEN, max_tokens=12, stop=inside)
    assert asleep[0].reasoning == thinking
    awake, _ = both(client, **GREEDY, messages=OPEN, max_tokens=12, stop=inside, extra_body={"stop_in_thinking": True})
    assert awake[0].reasoning == thinking[: thinking.index(inside)] and awake[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    choices, _ = both(client, **GREEDY, messages=PLAIN, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = choices[0].logprobs
    assert len(entries) == 5 and all(len(e.top_logprobs) == 3 for e in entries)
    assert all(e.logprob == max(t.logprob for t in e.top_logprobs) <= 0 for e in entries)
    assert b"".join(bytes(e.bytes) for e in entries).decode() == choices[0].content


def test_legacy_completions(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "prompt": ["one two", "three"], "max_tokens": 6}
    whole = client.completions.create(**body)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[i] for i in (0, 1)] == [c.text for c in whole.choices] and all(texts.values())
    assert whole.usage.completion_tokens == 12


def test_case_54_effort_levels(client: openai.OpenAI) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        reply = client.chat.completions.create(**GREEDY, messages=PLAIN, max_tokens=3, reasoning_effort=effort)
        assert reply.thinkfold["policy"]["thinking"]["enabled"] == (effort != "none")
    with pytest.raises(openai.BadRequestError, match="minimal"):
        client.chat.completions.create(**GREEDY, messages=PLAIN, reasoning_effort="banana")  # type: ignore[arg-type]


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["pebble"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=PLAIN)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"extra_body": {"thinking_budgets": 5}}, "thinking_budgets"),
        ({"extra_body": {"thinking_token_budget": -2}}, "thinking_token_budget"),
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"1536": 1}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [1536]}}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format.json_schema.schema.not",
        ),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
        ({"extra_body": {"thinkfold": {"fold": {"selector": "dorp"}}}}, "thinkfold.fold.selector"),
        ({"messages": [{"role": "user", "content": "x" * 20_000_000}]}, "messages"),
    ],
)
def test_errors_have_openai_shape(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": PLAIN, **body})
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert client.chat.completions.create(**GREEDY, messages=PLAIN, max_tokens=1).choices


def test_extreme_but_valid_numbers(client: openai.OpenAI) -> None:
    extra = {"top_k": 2**31 - 1, "min_p": 1, "repetition_penalty": 10, "thinking_token_budget": 10**12}
    reply = client.chat.completions.create(
        model="pebble", messages=PLAIN, max_tokens=10**30, top_p=1e-300, temperature=2, stop=["e"], extra_body=extra
    )
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_case_51_nan_never_reaches_the_engine(client: openai.OpenAI) -> None:
    for word in ("NaN", "Infinity", "-Infinity"):
        raw = json.dumps({**GREEDY, "messages": PLAIN})[:-1] + f', "top_p": {word}}}'
        reply = client._client.post("/chat/completions", content=raw.encode())
        assert reply.status_code == 400 and "error" in reply.json()
