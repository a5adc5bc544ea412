"""What is kept for a tenant or a session is forgotten, whole, and nobody else's: the real engine behind real keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from conftest import DUMMY, run_server

from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.server.access.gate import Access
from thinkfold.server.access.keys import ApiKey, KeyTable
from thinkfold.server.app import build_app

SECRETS = {"ann": "ann-secret-0123456789", "bob": "bob-secret-0123456789", "root": "root-secret-0123456789"}
KEYS = KeyTable(
    [
        ApiKey(name, hashlib.sha256(secret.encode()).hexdigest(), admin=name == "root")
        for name, secret in SECRETS.items()
    ]
)
PROMPT = "3 * 4, " * 40
SYSTEM = [{"role": "system", "content": PROMPT}]
YES: dict[str, Any] = {"structured_outputs": {"choice": ["yes"]}, "enable_thinking": False}
LEFT = {"responses": 1, "sessions": 1, "step_answers": 1, "conversations": 2, "handles": 1}


@pytest.fixture
async def clients() -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    config = EngineConfig(**DUMMY, own_process=False)
    app = build_app(start=lambda: AsyncEngine.start(config), access=Access(KEYS))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app):
        await app.state.thinkfold.slot.loaded()
        heads = {name: {"Authorization": f"Bearer {secret}"} for name, secret in SECRETS.items()}
        yield {
            name: httpx.AsyncClient(transport=transport, base_url="http://test", headers=head, timeout=60)
            for name, head in heads.items()
        }


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def leave_traces(client: httpx.AsyncClient) -> str:
    """One of everything that is kept; the id of the response."""
    await post(client, "/v1/thinkfold/prefixes", name="p", messages=SYSTEM)
    await post(client, "/v1/thinkfold/partial", prompt=PROMPT, until={"max_tokens": 2})
    wish = {"session": {"id": "s", "total_budget": 600}, "step_cache": {"step": "add"}}
    chat = [{"role": "user", "content": PROMPT}]
    await post(client, "/v1/chat/completions", messages=chat, thinkfold=wish, **YES)
    return (await post(client, "/v1/responses", input=PROMPT, max_output_tokens=2))["id"]


async def cached(client: httpx.AsyncClient, prompt: str = PROMPT) -> int:
    usage = (await post(client, "/v1/completions", prompt=prompt, max_tokens=1))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def check(gone: dict[str, Any], tenant: str) -> None:
    assert gone["id"] == tenant and gone["deleted"].pop("pages") > 10
    assert gone["deleted"].pop("prefixes") >= 1, "its own, and those of next turns that were computed by then"
    assert gone["deleted"] == LEFT


async def test_a_tenant_is_forgotten_and_only_that_one(clients: dict[str, httpx.AsyncClient]) -> None:
    ann, bob, root = clients["ann"], clients["bob"], clients["root"]
    stored = {name: await leave_traces(clients[name]) for name in ("ann", "bob")}
    check((await ann.delete("/v1/thinkfold/tenant")).json(), "ann")
    assert (await ann.get(f"/v1/responses/{stored['ann']}")).status_code == 404
    assert (await ann.get("/v1/thinkfold/prefixes")).json()["data"] == []
    assert await cached(ann) == 0 and await cached(bob) > 0
    assert (await bob.get(f"/v1/responses/{stored['bob']}")).status_code == 200
    assert (await bob.delete("/admin/tenants/ann")).status_code == 403
    check((await root.delete("/admin/tenants/bob")).json(), "bob")
    assert (await bob.get(f"/v1/responses/{stored['bob']}")).status_code == 404 and await cached(bob) == 0


async def test_a_tenant_that_is_busy_is_not_forgotten(clients: dict[str, httpx.AsyncClient]) -> None:
    ann, bob = clients["ann"], clients["bob"]
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
    task = asyncio.create_task(ann.post("/v1/completions", json=body))
    refused = await until(lambda: ann.delete("/v1/thinkfold/tenant"), lambda reply: reply.status_code == 409)
    assert refused.status_code == 409 and "1 of the tenant's responses still run" in refused.text
    assert (await bob.delete("/v1/thinkfold/tenant")).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: ann.delete("/v1/thinkfold/tenant"), lambda reply: reply.status_code == 200)


async def until(ask: Callable[[], Awaitable[httpx.Response]], good: Callable[[httpx.Response], bool]) -> httpx.Response:
    for _ in range(400):
        reply = await ask()
        if good(reply):
            return reply
        await asyncio.sleep(0.01)
    raise AssertionError(reply.text)


@pytest.fixture(scope="module")
def sockets() -> Iterator[str]:
    """The same behind a socket, where a stream can be read while it runs; its address."""
    for served in run_server(EngineConfig(**DUMMY), Access(KEYS)):
        yield served.url


def of(session: str) -> dict[str, Any]:
    return {"session": {"id": session, "total_budget": 100_000}}


async def speak(client: httpx.AsyncClient, session: str) -> dict[str, Any]:
    """Calls of a session that leave one of everything, the last one paused: the response, the handle, the call."""
    chat, step = [{"role": "user", "content": f"{session}: {PROMPT}"}], {"step": f"step of {session}"}
    await post(client, "/v1/chat/completions", messages=chat, thinkfold={**of(session), "step_cache": step}, **YES)
    stored = await post(
        client, "/v1/responses", input=f"{session}: {PROMPT}", max_output_tokens=2, thinkfold=of(session)
    )
    body = {"prompt": f"{session} {PROMPT}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    stream = await client.send(
        client.build_request("POST", "/v1/completions", json={**body, "thinkfold": of(session)}), stream=True
    )
    lines = stream.aiter_lines()
    name = json.loads((await anext(lines)).removeprefix("data: "))["id"]
    path = f"/v1/thinkfold/responses/{name}/control"
    handle = (await post(client, path, action="fork"))["handle"]["id"]
    await post(client, path, action="pause")
    return {"response": stored["id"], "handle": handle, "call": name, "end": asyncio.create_task(last_of(lines))}


async def last_of(lines: AsyncIterator[str]) -> str:
    """How a stream ends."""
    events = [json.loads(line.removeprefix("data: ")) async for line in lines if line.startswith("data: {")]
    return next(c["finish_reason"] for e in reversed(events) for c in e["choices"] if c["finish_reason"])


async def kinds_of(client: httpx.AsyncClient, session: str, kept: dict[str, Any]) -> set[str]:
    """Which kinds of what a session has left are there."""
    step = {"thinkfold": {"step_cache": {"step": f"step of {session}"}}}
    chat = [{"role": "user", "content": f"{session}: {PROMPT}"}]
    reply = await post(client, "/v1/chat/completions", messages=chat, **step, **YES)
    there = {
        "step": reply["usage"]["thinkfold"]["step_cache"]["hit"],
        "pages": await cached(client, f"{session} {PROMPT}") > 0,
        "budget": (await client.get(f"/v1/thinkfold/sessions/{session}")).status_code == 200,
        "response": (await client.get(f"/v1/responses/{kept['response']}")).status_code == 200,
        "handle": (await client.delete(f"/v1/thinkfold/partial/{kept['handle']}")).status_code == 200,
        "call": not kept["end"].done(),
    }
    return {kind for kind, found in there.items() if found}


async def test_a_session_is_forgotten_and_only_that_one_of_that_tenant(sockets: str) -> None:
    heads = {name: {"Authorization": f"Bearer {secret}"} for name, secret in SECRETS.items()}
    async with (
        httpx.AsyncClient(base_url=sockets, headers=heads["ann"], timeout=60) as ann,
        httpx.AsyncClient(base_url=sockets, headers=heads["bob"], timeout=60) as bob,
    ):
        kept = {(who, name): await speak(who, name) for who, name in ((ann, "s"), (ann, "t"), (bob, "s"))}
        reply = await ann.delete("/v1/thinkfold/sessions/s")
        assert reply.status_code == 200 and reply.json()["deleted"], reply.text
        removed = reply.json()["removed"]
        assert removed.pop("pages") > 10 and removed.pop("prefixes") <= 1, "of a next turn, if one was computed by then"
        assert removed == {"responses": 1, "step_answers": 1, "conversations": 1, "calls": 1, "handles": 1}
        assert await kept[ann, "s"]["end"] == "abort", "a paused call has ended, too"
        assert await kinds_of(ann, "s", kept[ann, "s"]) == set()
        for who, name in ((ann, "t"), (bob, "s")):
            there = await kinds_of(who, name, kept[who, name])
            assert there == {"step", "pages", "budget", "response", "handle", "call"}
            await who.delete(f"/v1/thinkfold/sessions/{name}")
            assert await kept[who, name]["end"] == "abort"
        assert (await ann.delete("/v1/thinkfold/sessions/s")).status_code == 404


@pytest.mark.parametrize("how", [{"vote": {"n": 12}}, {"search": {"width": 2, "branch": 2, "depth": 8}}])
async def test_a_decision_ends_with_its_session_and_starts_nothing_more(sockets: str, how: dict[str, Any]) -> None:
    head, prompt = {"Authorization": f"Bearer {SECRETS['bob']}"}, f"{next(iter(how))} {PROMPT}"
    chat = {"messages": [{"role": "user", "content": prompt}], "temperature": 1.0, "max_tokens": 1500, **how}
    async with httpx.AsyncClient(base_url=sockets, headers=head, timeout=60) as bob:
        task = asyncio.create_task(bob.post("/v1/chat/completions", json={**chat, "thinkfold": of("v")}))
        running = lambda reply: reply.json()["running"] > 0  # noqa: E731
        await until(lambda: bob.get("/v1/thinkfold/engine"), running)
        gone = await bob.delete("/v1/thinkfold/sessions/v")
        assert gone.json()["removed"]["calls"] == 1, gone.text
        reply = await task
        assert reply.status_code == 409 and "its session was deleted" in reply.text
        await until(lambda: bob.get("/v1/thinkfold/engine"), lambda reply: not running(reply))
        usage = (await post(bob, "/v1/chat/completions", messages=chat["messages"], max_tokens=1))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
