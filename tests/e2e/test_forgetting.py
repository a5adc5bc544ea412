"""A tenant's data is forgotten, whole, and nobody else's: the real engine with random weights behind real keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from conftest import DUMMY

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
    ending: dict[str, Any] = {"structured_outputs": {"choice": ["yes"]}, "enable_thinking": False}
    chat = [{"role": "user", "content": PROMPT}]
    await post(client, "/v1/chat/completions", messages=chat, thinkfold=wish, **ending)
    return (await post(client, "/v1/responses", input=PROMPT, max_output_tokens=2))["id"]


async def cached(client: httpx.AsyncClient) -> int:
    usage = (await post(client, "/v1/completions", prompt=PROMPT, max_tokens=1))["usage"]
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
    for _ in range(400):
        refused = await ann.delete("/v1/thinkfold/tenant")
        if refused.status_code == 409:
            break
        await asyncio.sleep(0.01)
    assert refused.status_code == 409 and "1 of the tenant's responses still run" in refused.text
    assert (await bob.delete("/v1/thinkfold/tenant")).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(400):
        answer = await ann.delete("/v1/thinkfold/tenant")
        if answer.status_code == 200:
            break
        await asyncio.sleep(0.01)
    assert answer.status_code == 200, answer.text
