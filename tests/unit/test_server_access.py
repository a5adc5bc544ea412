"""Keys in front of every route: who may call what, how much, and what a refusal says."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_stand_in import LOOP, ScriptedEngine, chat_body, eventually

from thinkfold.errors import ParameterError
from thinkfold.server.access.gate import Access
from thinkfold.server.access.keys import ApiKey, KeyTable, load_keys
from thinkfold.server.access.quotas import Bucket, Quotas
from thinkfold.server.app import build_app
from thinkfold.server.state import ServerOptions
from thinkfold.server.ui.routes import PATHS as PAGE

RIGHT, ADMIN, WRONG = "right-key-0123456789", "admin-key-0123456789", "wrong-key-0123456789"
BODY = chat_body(max_tokens=5)


def key(name: str, secret: str, **more: Any) -> ApiKey:
    return ApiKey(name, hashlib.sha256(secret.encode()).hexdigest(), **more)


TABLE = KeyTable([key("ann", RIGHT), key("root", ADMIN, admin=True)])


@asynccontextmanager
async def guarded(
    access: Access, engine: ScriptedEngine | None = None, options: ServerOptions | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(engine or ScriptedEngine(), access=access, options=options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        await app.state.thinkfold.slot.loaded()
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def all_routes() -> list[tuple[str, str]]:
    """(method, path) of every registered route, and of other spellings of them."""
    found: list[tuple[str, str]] = []
    unseen: list[Any] = list(build_app(ScriptedEngine()).routes)
    while unseen:
        route = unseen.pop(0)
        if hasattr(route, "original_router"):
            unseen += route.original_router.routes
        else:
            methods = {*(getattr(route, "methods", None) or {"GET"}), "OPTIONS", "HEAD"}
            found += [(method, route.path) for method in sorted(methods)]
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/admin/keys")} < set(found)
    odd = ["/v1/models/", "//v1/models", "/V1/models", "/models", "/health/", "//health", "/Health", "/ready/x", "/ui"]
    return [*found, *(("GET", path) for path in odd), ("POST", "/health"), ("OPTIONS", "/health")]


@pytest.mark.parametrize(("method", "path"), all_routes())
async def test_case_62_every_route_denies_without_a_key(method: str, path: str) -> None:
    engine = ScriptedEngine()
    async with guarded(Access(TABLE), engine) as client:
        for headers in ({}, bearer(WRONG), {"x-api-key": WRONG}, {"Authorization": f"Basic {RIGHT}"}, bearer("")):
            reply = await client.request(method, f"http://test{path}", headers=headers)
            if method in ("GET", "HEAD") and path in ("/health", "/ready", *PAGE):
                assert reply.status_code != 401
                continue
            assert reply.status_code == 401, (headers, reply.text)
            assert reply.headers["www-authenticate"] == "Bearer" and "access-control-allow-origin" not in reply.headers
            if method != "HEAD":
                assert reply.json()["error"]["type"] == "authentication_error" and WRONG not in reply.text
        for headers in (bearer(RIGHT), {"Authorization": f"bearer {RIGHT}"}, {"x-api-key": RIGHT}):
            reply = await client.request(method, f"http://test{path}", headers=headers)
            assert reply.status_code == 403 if path.startswith("/admin") else reply.status_code not in (401, 403)
    assert not engine.calls


async def test_a_key_is_neither_logged_nor_echoed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with guarded(Access(TABLE)) as client:
            for secret in (RIGHT, WRONG):
                reply = await client.post("/v1/chat/completions", json={"x": 1}, headers=bearer(secret))
                assert secret not in reply.text and secret not in str(reply.headers)
            metrics = await client.get("/metrics", headers=bearer(RIGHT))
    assert 'thinkfold_errors_total{status="401"} 1.0' in metrics.text and RIGHT not in metrics.text
    assert RIGHT not in caplog.text and WRONG not in caplog.text


async def test_open_routes_are_the_operators_choice() -> None:
    async with guarded(Access(TABLE, open_routes=("/metrics",))) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/health")).status_code == 401


async def test_admin_routes_are_apart() -> None:
    async with guarded(Access(TABLE)) as client:
        await client.post("/v1/chat/completions", json=BODY, headers=bearer(RIGHT))
        rows = (await client.get("/admin/keys", headers=bearer(ADMIN))).json()["data"]
        assert [row["name"] for row in rows] == ["ann", "root"] and rows[0]["requests"] == 1 and rows[0]["tokens"] > 0
        assert TABLE.keys[0].sha256 not in str(rows)
    async with guarded(Access()) as client:
        assert (await client.get("/admin/keys")).status_code == 403, "without keys nobody is an administrator"
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_tenants_have_prefix_namespaces_of_their_own() -> None:
    engine = ScriptedEngine()
    table = KeyTable([key("a", RIGHT, tenant="t"), key("b", WRONG)])
    async with guarded(Access(table), engine) as client:
        for secret in (RIGHT, WRONG):
            await client.post("/v1/chat/completions", json={**BODY, "cache_salt": "x"}, headers=bearer(secret))
    assert [call.namespace for call in engine.calls] == [("tenant=t", "salt=x"), ("tenant=b", "salt=x")]


async def test_requests_per_minute() -> None:
    now = [0.0]
    access = Access(KeyTable([key("a", RIGHT, requests_per_minute=2)]), quotas=Quotas(lambda: now[0]))
    async with guarded(access) as client:
        replies = [await client.get("/v1/models", headers=bearer(RIGHT)) for _ in range(3)]
        assert [r.status_code for r in replies] == [200, 200, 429]
        assert replies[2].headers["retry-after"] == "30"
        assert replies[2].json()["error"]["code"] == "rate_limit_exceeded"
        now[0] += 30
        assert (await client.get("/v1/models", headers=bearer(RIGHT))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_owed_and_paid_back(stream: bool) -> None:
    now = [0.0]
    access = Access(KeyTable([key("a", RIGHT, tokens_per_minute=12)]), quotas=Quotas(lambda: now[0]))
    async with guarded(access) as client:
        body = {**BODY, "stream": stream}
        assert (await client.post("/v1/chat/completions", json=body, headers=bearer(RIGHT))).status_code == 200
        refused = await client.post("/v1/chat/completions", json=body, headers=bearer(RIGHT))
        assert refused.status_code == 429 and "tokens_per_minute (12)" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models", headers=bearer(RIGHT))).status_code == 200
        now[0] += 60
        assert (await client.post("/v1/chat/completions", json=body, headers=bearer(RIGHT))).status_code == 200


async def test_concurrent_thinking() -> None:
    engine = ScriptedEngine(scripts=[LOOP])
    access = Access(KeyTable([key("a", RIGHT, concurrent_thinking=2)]))
    async with guarded(access, engine) as client:
        engine.gate = asyncio.Event()
        body = {**BODY, "n": 2}
        first = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=bearer(RIGHT)))
        await eventually(lambda: engine.running == 1)
        refused = await client.post("/v1/chat/completions", json=BODY, headers=bearer(RIGHT))
        assert refused.status_code == 429 and "concurrent_thinking (2)" in refused.json()["error"]["message"]
        off = {**BODY, "enable_thinking": False}
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=off, headers=bearer(RIGHT)))
        await eventually(lambda: engine.running == 2)
        engine.gate.set()
        assert {(await first).status_code, (await plain).status_code} == {200}
        assert access.quotas.usage(access.keys.keys[0]).thinking == 0
        assert (await client.post("/v1/chat/completions", json=body, headers=bearer(RIGHT))).status_code == 200


async def test_a_refused_request_holds_nothing() -> None:
    access = Access(KeyTable([key("a", RIGHT, concurrent_thinking=1)]))
    engine = ScriptedEngine(refuse=ParameterError("temperature", "no"))
    async with guarded(access, engine) as client:
        for stream in (False, True):
            reply = await client.post("/v1/chat/completions", json={**BODY, "stream": stream}, headers=bearer(RIGHT))
            assert reply.status_code == 400
    assert access.quotas.usage(access.keys.keys[0]).thinking == 0


async def test_draining_takes_nothing_new_and_finishes_what_runs() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    async with guarded(Access(TABLE), engine) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json=BODY, headers=bearer(RIGHT)))
        await eventually(lambda: engine.running == 1)
        assert (await client.post("/admin/drain", headers=bearer(ADMIN))).json() == {"draining": True}
        refused = await client.post("/v1/chat/completions", json=BODY, headers=bearer(RIGHT))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_draining"
        ready = await client.get("/ready")
        assert ready.status_code == 503 and ready.json()["reason"] == "draining"
        assert (await client.get("/health")).status_code == 200
        assert engine.gate is not None
        engine.gate.set()
        assert (await running).status_code == 200


async def test_large_headers_are_refused() -> None:
    async with guarded(Access(max_header_bytes=2048)) as client:
        assert (await client.get("/health", headers={"x": "y" * 2048})).status_code == 431
        assert (await client.get("/health", headers={"x": "y" * 100})).status_code == 200


async def test_pages_of_other_origins_may_not_call_unless_named() -> None:
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with guarded(Access()) as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers=ask)).headers
        assert (await client.options("/v1/models", headers=ask)).status_code == 405
    async with guarded(Access(TABLE), options=ServerOptions(cors_origins=("https://app.example",))) as client:
        allowed = await client.options("/v1/chat/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.options("/v1/chat/completions", headers={**ask, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_refusals_have_the_shape_of_their_api() -> None:
    async with guarded(Access(TABLE)) as client:
        reply = await client.post("/v1/messages", json={})
        assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == "authentication_error"


def test_keys_of_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(RIGHT.encode()).hexdigest()
    path.write_text(f'[[keys]]\nname = "ann"\nsha256 = "{digest}"\ntenant = "t"\ntokens_per_day = 5\n')
    table = load_keys(str(path), {"THINKFOLD_API_KEYS": f" {ADMIN} , {WRONG}"})
    assert table is not None
    found = table.find(RIGHT)
    assert found is not None and (found.name, found.owner, found.tokens_per_day) == ("ann", "t", 5)
    second = table.find(WRONG)
    assert second is not None and second.name == "environment-2" and not second.admin
    assert table.find("") is None and table.find("\udc80") is None
    assert load_keys(None, {}) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "api_keys_file: holds no keys"),
        ("[[keys]\n", "api_keys_file: is not valid TOML"),
        ("keys = 3\n", "api_keys_file: must hold"),
        ('[[keys]]\nname = "a"\n', "api_keys.sha256: is missing"),
        ('[[keys]]\nname = "a"\nsha256 = "x"\n', "api_keys.sha256: of a must be"),
        (f'[[keys]]\nname = "a b"\nsha256 = "{"0" * 64}"\n', "api_keys.name"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\nquota = 1\n', "api_keys.quota: is not a known field"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\ntokens_per_day = 0\n', "api_keys.tokens_per_day"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\nadmin = 1\n', "api_keys.admin"),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\n' * 2, "api_keys.name: a is there twice"),
    ],
)
def test_wrong_key_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=words.replace("[", r"\[")):
        load_keys(str(path), {})
    with pytest.raises(ParameterError, match="cannot be read"):
        load_keys(str(tmp_path / "nowhere"), {})
    with pytest.raises(ParameterError, match="fewer than 16"):
        load_keys(None, {"THINKFOLD_API_KEYS": "short"})


def test_a_bucket_refills_and_may_owe() -> None:
    now = [0.0]
    bucket = Bucket(60, 60.0, lambda: now[0])
    bucket.take(90)
    assert bucket.left == -30 and bucket.wait_s(1) == 31
    now[0] += 1000
    assert bucket.left == 60 and bucket.wait_s(1) == 0
