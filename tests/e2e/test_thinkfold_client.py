"""`thinkfold.Client` against a real server with Pebble's weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import Served

from thinkfold import AsyncClient, Client
from thinkfold.types import BestOfParams, SearchParams, Until, VoteParams

QUESTION: list[Any] = [{"role": "user", "content": "What is 23 * 47 + 38 * 91?"}]


@pytest.fixture
def client(pebble: Served) -> Iterator[Client]:
    with Client(f"{pebble.url}/v1", timeout=60) as client:
        yield client


def streamed(client: Client, **more: Any) -> Iterator[Any]:
    """Chunks with something in them."""
    body: dict[str, Any] = {"model": "pebble", "messages": QUESTION, "temperature": 0, "max_tokens": 400, **more}
    yield from (chunk for chunk in client.chat.completions.create(stream=True, **body) if chunk.choices)


def test_orders_to_a_running_response(client: Client) -> None:
    words, content, last = 0, "", None
    for chunk in streamed(client):
        last = chunk.choices[0]
        words += len((getattr(last.delta, "reasoning", None) or "").split())
        content += last.delta.content or ""
        if 10 <= words < 10_000:
            words = 10_000  # once
            steer(client, chunk)
    assert last is not None and last.finish_reason == "stop" and content
    assert getattr(last, "thinking_end_reason", None) == "control"


def steer(client: Client, chunk: Any) -> None:
    running = client.running(chunk)
    running.pause()
    with pytest.raises(openai.ConflictError):
        running.pause()
    branch = running.fork(at=4)
    assert branch.handle is not None and branch.handle.position == 4
    assert running.set_budget(200) == 200
    assert (running.set_budget(-1) or 10**9) > 200, "no limit, or what max_tokens leaves"
    with pytest.raises(openai.BadRequestError) as refused:
        running.set_budget(-5)
    assert refused.value.param == "budget"
    assert running.inject("\nWait, that is enough.\n") > 10
    running.end_thinking()
    running.resume()
    (more,) = branch.extend(Until(max_tokens=5))
    assert more.part is not None and more.part.output_tokens == 9 and more.reasoning
    more.rollback().release()
    assert more.handle is None and branch.handle is None


def test_a_response_is_cancelled_and_foreign_ones_are_not_there(client: Client) -> None:
    last = None
    for chunk in streamed(client, extra_body={"cache_salt": "acme"}):
        if last is None:
            with pytest.raises(openai.NotFoundError):
                client.running(chunk).cancel()
            client.running(chunk, cache_salt="acme").cancel(keep_partial=False)
        last = chunk.choices[0]
    assert last is not None and last.finish_reason == "abort"


def test_parts_go_on_from_handles_and_back(client: Client) -> None:
    branches = client.begin(Until("segment", max_tokens=24), messages=QUESTION, n=2, temperature=0.7, seed=1)
    first, other = branches
    assert first.reasoning and not first.finished and first.usage["prompt_tokens"] > 0
    (more,) = first.extend(Until(max_tokens=8))
    assert more.part is not None and more.reasoning == first.reasoning + more.part.reasoning
    assert more.rollback() is first and more.handle is None
    (again,) = first.extend(Until(max_tokens=8))
    assert again.reasoning == more.reasoning, "it goes on as it would have"
    for branch in (again, first, other):
        branch.release()
        branch.release()
    (ended,) = client.begin(prompt="Hello", max_tokens=4)
    assert ended.finished and ended.handle is None and ended.part is not None
    assert ended.part.finish_reason == "length" and ended.part.output_tokens == 4


def test_handles_are_their_owners_and_errors_name_fields(client: Client) -> None:
    (mine,) = client.begin(Until(max_tokens=2), prompt="Hello", cache_salt="acme")
    assert mine.extend(Until(max_tokens=2))[0].handle is not None, "its labels go with it"
    mine._owner = type(mine._owner)()
    with pytest.raises(openai.NotFoundError):
        mine.extend(Until(max_tokens=2))
    with pytest.raises(openai.BadRequestError) as refused:
        client.begin(Until(max_tokens=2), messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"


def test_a_session_shares_one_budget(client: Client) -> None:
    session = client.session("client-test", 2000)
    body: dict[str, Any] = {"model": "pebble", "temperature": 0, "max_tokens": 40}
    reply = session.chat(QUESTION, **body)
    assert reply.thinkfold["session"]["call_budget"] == 1000
    state = session.show()
    spent = reply.usage.completion_tokens_details.reasoning_tokens
    assert (state.total_budget, state.spent, state.calls) == (2000, spent, 1) and spent > 0
    later = client.session("client-test").chat(QUESTION, **body)
    assert later.thinkfold["session"]["call_budget"] == (2000 - spent) // 2
    session.delete()
    with pytest.raises(openai.NotFoundError):
        session.show()
    with pytest.raises(openai.BadRequestError) as refused:
        client.session("client-test").chat(QUESTION, **body)
    assert refused.value.param == "thinkfold.session.total_budget"


def test_a_vote_and_a_search_by_typed_objects(client: Client) -> None:
    short: dict[str, Any] = {"model": "pebble", "max_tokens": 90, "extra_body": {"thinking_token_budget": 40}}
    voted = client.decide(VoteParams(2, "all"), QUESTION, **short)
    assert voted.thinkfold["vote"]["started"] == 2 and voted.choices[0].message.content
    how = SearchParams(width=2, branch=2, depth=1, min_step_tokens=8, max_step_tokens=16)
    body = client.decision_body(how, {"thinking_token_budget": 40})
    walked: Any = client.responses.create(model="pebble", input=QUESTION, max_output_tokens=90, extra_body=body)
    assert walked.thinkfold["search"]["deepest"] == 1 and walked.output_text
    with pytest.raises(openai.BadRequestError) as refused:
        client.decide(BestOfParams("nobody"), QUESTION, **short)
    assert refused.value.param == "best_of.verifier"


def test_the_how_to_runs(pebble: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/steer-from-your-code.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        easier = re.sub(r"What is [^?]+", "What is 3 * 4", block)
        exec(easier.replace("http://127.0.0.1:8000", pebble.url), {})
    assert "boxed" in capsys.readouterr().out


async def test_the_asynchronous_twin(pebble: Served) -> None:
    async with AsyncClient(f"{pebble.url}/v1", timeout=60) as client:
        (first,) = await client.begin(Until(max_tokens=6), messages=QUESTION, temperature=0)
        (more,) = await first.extend(Until(max_tokens=6))
        assert (await more.rollback()) is first and more.handle is None
        await first.release()
        session = client.session("async-test", 2000)
        await session.chat(QUESTION, model="pebble", max_tokens=20)
        assert (await session.show()).calls == 1
        voted = await client.decide(VoteParams(2), QUESTION, model="pebble", max_tokens=20)
        assert voted.thinkfold["vote"]["started"] == 2
        await session.delete()
        stream = await client.chat.completions.create(
            model="pebble", messages=QUESTION, max_tokens=160, temperature=0, stream=True
        )
        ending, ordered = None, False
        async for chunk in stream:
            if not chunk.choices:
                continue
            if not ordered and getattr(chunk.choices[0].delta, "reasoning", None):
                ordered = True
                running = client.running(chunk)
                await running.pause()
                await running.end_thinking()
                await running.resume()
            ending = getattr(chunk.choices[0], "thinking_end_reason", None) or ending
    assert ending == "control"
