"""What a remote engine is made of, without a server: rows, tokens, turns, dialects, bodies."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import httpx
import pytest

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote.dialect import Dialect
from thinkfold.deploy.remote.http import Api, Remote, _refusal
from thinkfold.deploy.remote.rows import read_rows
from thinkfold.deploy.remote.tokens import TokenReader
from thinkfold.deploy.remote.turns import Turns
from thinkfold.engine.language import Language, load_language
from thinkfold.errors import ParameterError, RemoteBusyError, RemoteError, UnsupportedError
from thinkfold.types import ControlParams, EarlyStop, Phase, SamplingParams, Tier

LEGACY = {
    "tokens": ["7", "<"],
    "token_logprobs": [-0.1, -2.0],
    "top_logprobs": [{"7": -0.1, "</think>": -2.5}, {"x": -0.2}],
}


@pytest.fixture(scope="module")
def language() -> Language:
    return load_language(EngineConfig())


@pytest.fixture(scope="module")
def reader(language: Language) -> TokenReader:
    return TokenReader(language)


def event(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def test_rows_of_both_shapes_say_the_same() -> None:
    chat = {
        "content": [
            {"id": 22, "token": "7", "logprob": -0.1, "top_logprobs": [{"id": 22, "token": "7", "logprob": -0.1}]},
            {"id": 27, "token": "<", "logprob": -2.0, "top_logprobs": [{"id": 9, "token": "x", "logprob": -0.2}]},
        ]
    }
    legacy, listed = read_rows(LEGACY), read_rows(chat)
    assert [(row.name, row.logprob) for row in legacy] == [(row.name, row.logprob) for row in listed]
    assert [row.token_id for row in listed] == [22, 27] and legacy[0].token_id is None
    assert [name for name, _, _ in legacy[1].top] == ["x", "<"], "the drawn token is one of its row"
    assert read_rows(None) == read_rows({}) == []


def test_statistics_of_a_row() -> None:
    first, second = (row.statistics("</think>") for row in read_rows(LEGACY))
    assert first.margin == pytest.approx(2.4) and second.margin == math.inf
    assert first.confidence == pytest.approx(1.3)
    sure = read_rows({"tokens": ["a"], "token_logprobs": [0.0], "top_logprobs": [{"a": 0.0}]})[0].statistics(None)
    assert sure.entropy == 0.0 and math.isnan(sure.margin)
    half = read_rows({"tokens": ["a"], "token_logprobs": [math.log(0.5)], "top_logprobs": [None]})[0].statistics(None)
    assert half.entropy == pytest.approx(math.log(2)), "the rest counts as one token"


def test_text_becomes_tokens(reader: TokenReader) -> None:
    part = reader.part(Phase.THINKING)
    ids = [token.token_id for token in part.read(event("So it is 7.\n</think>\n\n")).tokens]
    assert reader.text(ids) == "So it is 7.\n</think>\n\n" and reader.end_ids[0] in ids
    rows = part.read(event("7<", logprobs=LEGACY)).tokens
    assert reader.text([token.token_id for token in rows]) == "7<"
    assert [token.stats.logprob for token in rows if token.stats] == [-0.1, -2.0]
    assert rows[0].logprobs is not None and (reader.end_ids[0], -2.5) in rows[0].logprobs.top


def test_names_that_do_not_make_up_the_text_are_not_believed(reader: TokenReader) -> None:
    tokens = reader.part(Phase.ANSWER).read(event("two three", logprobs=LEGACY)).tokens
    assert reader.text([token.token_id for token in tokens]) == "two three"
    assert all(token.stats is not None for token in tokens) and len(tokens) != len(LEGACY["tokens"])


def test_ids_are_believed(reader: TokenReader) -> None:
    assert [t.token_id for t in reader.part(Phase.ANSWER).read(event("", token_ids=[5, 6])).tokens] == [5, 6]
    with pytest.raises(RemoteError, match="outside the vocabulary"):
        reader.part(Phase.ANSWER).read(event("", token_ids=[10**6]))


@pytest.mark.parametrize("phase", list(Phase))
def test_thinking_that_is_told_apart_gets_its_markers_back(reader: TokenReader, phase: Phase) -> None:
    part = reader.part(phase)
    events = [event("", reasoning="a b"), event("", reasoning=" c"), event("7", reasoning=None)]
    ids = [token.token_id for each in events for token in part.read(each).tokens]
    start = "" if phase is Phase.THINKING else "<think>"
    assert reader.text(ids) == f"{start}a b c</think>7"


@pytest.mark.parametrize(
    "bad", [[], "x", {"choices": ["x"]}, event("7", logprobs={"tokens": ["7"], "token_logprobs": []})]
)
def test_what_is_no_event_is_an_error(reader: TokenReader, bad: Any) -> None:
    with pytest.raises(RemoteError, match="cannot be read"):
        reader.part(Phase.ANSWER).read(bad)


def test_typed_control_tokens_are_found(reader: TokenReader, language: Language) -> None:
    ids = language.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<think>\n", add_special_tokens=False)
    reader.check_prompt(ids)
    typed = [i for piece in ("</th", "ink>") for i in reader.encode(piece)]
    with pytest.raises(UnsupportedError, match="control token"):
        reader.check_prompt([*ids, *typed])


async def test_turns_go_by_weight() -> None:
    """The heavy tier comes when the light one has worked already: it starts level, and gets three turns for one."""
    turns, order = Turns(1), []
    heavy, light = Tier("heavy", weight=3.0), Tier("light", weight=1.0)

    async def work(tier: Tier) -> None:
        async with turns.turn(tier):
            order.append(tier.name)
            turns.charge(tier, 10)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(tier) for tier in (light, light, light, light, heavy, heavy, heavy, heavy)))
    assert order == ["light", "light", "heavy", "heavy", "heavy", "light", "heavy", "light"]
    assert turns.waiting == 0 and not any(turns.running.values())


async def test_who_gives_up_waiting_leaves_no_place_behind() -> None:
    turns, tier, inside = Turns(1), Tier(), asyncio.Event()

    async def hold() -> None:
        async with turns.turn(tier):
            inside.set()
            await asyncio.Event().wait()

    first = asyncio.create_task(hold())
    await inside.wait()
    waiting = [asyncio.create_task(hold()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.cancel()
    inside.clear()
    await asyncio.wait_for(inside.wait(), 5)
    waiting[1].cancel()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    assert turns.waiting == 0 and not any(turns.running.values())
    async with asyncio.timeout(5), turns.turn(tier):
        pass


def test_a_dialect_refuses_what_the_server_does_not_know() -> None:
    plain = Dialect("m")
    plain.check(SamplingParams(temperature=0.5, top_p=0.9, stop=("x",)))
    for more in ({"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"logprobs": 0}):
        with pytest.raises(UnsupportedError) as refused:
            plain.check(SamplingParams(**more))
        assert refused.value.field == next(iter(more))
    knows = replace(plain, fields=frozenset({"top_k", "repeat_penalty"}), top=5, logit_bias=True)
    knows.check(SamplingParams(top_k=5, repetition_penalty=1.2, logprobs=5, min_tokens=3))
    assert knows.sampled(SamplingParams(top_k=-1)) == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repeat_penalty": 1.0
    }  # fmt: skip
    assert replace(knows, all_k=-1).sampled(SamplingParams())["top_k"] == -1
    with pytest.raises(UnsupportedError, match="gives 5 at most"):
        knows.check(SamplingParams(logprobs=6))


def test_a_dialect_without_log_probs_refuses_rules_that_read_them() -> None:
    plain = Dialect("m")
    plain.check_control(ControlParams(early_stop=EarlyStop(consistency=(2, 2))))
    for control in (ControlParams("balanced"), ControlParams(early_stop=EarlyStop(entropy=0.1))):
        with pytest.raises(UnsupportedError):
            plain.check_control(control)
        replace(plain, top=1).check_control(control)


def test_log_probs_are_asked_for_where_somebody_looks() -> None:
    dialect = Dialect("m", top=20, extra={"skip_special_tokens": False})
    assert "logprobs" not in dialect.body("x", 4, look=False)
    assert dialect.body("x", 4, look=True)["logprobs"] == 20
    assert replace(dialect, row_ids=True).body("x", 4, look=False)["logprobs"] == 1, "ids come with them"
    assert dialect.body("x", 4, look=False)["skip_special_tokens"] is False


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": {"message": "full"}}, "full"),
        ({"detail": "full"}, "full"),
        ({"object": "error", "message": "full"}, "full"),
        ("<html>full</html>", "full"),
    ],
)
def test_refusals_of_all_shapes_are_read(body: Any, says: str) -> None:
    kept = {"json": body} if isinstance(body, dict) else {"text": body}
    busy = _refusal(httpx.Response(429, headers={"Retry-After": "9"}, **kept))
    assert isinstance(busy, RemoteBusyError) and busy.retry_after == 9.0 and says in str(busy)
    failed = _refusal(httpx.Response(422, **kept))
    assert isinstance(failed, RemoteError) and failed.status == 422 and says in str(failed)


async def test_silence_and_nobody_are_told_apart() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    api = Api(Remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=0.05))
    with pytest.raises(RemoteError, match="silent for too long") as refused:
        await api.get("/v1/models")
    assert not refused.value.unreachable
    with pytest.raises(RemoteError, match="silent for too long"):
        await anext(api.stream("/v1/completions", {}))
    server.close()
    await server.wait_closed()
    with pytest.raises(RemoteError, match="cannot be reached") as refused:
        await api.post("/v1/completions", {})
    assert refused.value.unreachable
    await api.close()


def test_an_address_must_be_one() -> None:
    assert Remote("http://x:1/v1/").root == Remote("http://x:1").root == "http://x:1"
    for wrong in ({"base_url": "x:1"}, {"base_url": "http://x", "timeout_s": 0.0}):
        with pytest.raises(ParameterError):
            Remote(**wrong)
