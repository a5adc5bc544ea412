"""Loading, readiness, metrics, and clients that go away, around a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_stand_in import LOOP, ScriptedEngine, StandInHealth, chat, chat_body, eventually, serving

from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.server.app import build_app
from thinkfold.server.streaming import EventStream


async def test_case_59_loading_is_alive_and_not_ready() -> None:
    gate = asyncio.Event()

    async def start() -> ScriptedEngine:
        await gate.wait()
        return ScriptedEngine()

    async with serving(start=start) as client:
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert ready.status_code == 503 and ready.json()["reason"] == "loading"
        waiting = await chat(client)
        assert waiting.status_code == 503 and waiting.headers["retry-after"]
        assert "thinkfold_ready 0.0" in (await client.get("/metrics")).text
        gate.set()
        for _ in range(200):
            if (await client.get("/ready")).status_code == 200:
                break
            await asyncio.sleep(0.01)
        assert (await chat(client)).status_code == 200


async def test_case_59_failed_loading() -> None:
    async def start() -> ScriptedEngine:
        raise ParameterError("model", "no such folder")

    async with serving(start=start) as client:
        await asyncio.sleep(0)
        health = await client.get("/health")
        assert health.status_code == 503 and "no such folder" in health.json()["reason"]
        assert (await chat(client)).json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        (StandInHealth(), 200, 200),
        (StandInHealth(ready=False, reason="no step for 61 s"), 200, 503),
        (StandInHealth(alive=False, ready=False, reason="device error"), 503, 503),
    ],
)
async def test_case_59_stalled_and_dead(state: StandInHealth, health: int, ready: int) -> None:
    async with serving(ScriptedEngine(state=state)) as client:
        assert (await client.get("/health")).status_code == health
        reply = await client.get("/ready")
        assert reply.status_code == ready and (ready == 200 or reply.json()["reason"] == state.reason)


async def test_the_engine_stops_with_the_app() -> None:
    engine = ScriptedEngine()
    async with serving(engine):
        assert not engine.stopped
    assert engine.stopped


async def test_case_59_death_in_the_middle_reaches_the_stream() -> None:
    class Dying(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in ScriptedEngine.generate(self, *args, **kwargs):
                yield output
                raise EngineDeadError("device error")

    async with serving(Dying()) as client:
        text = (await chat(client, stream=True)).text
        assert (await chat(client)).status_code == 503
    last, done = text.strip().split("\n\n")[-2:]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead" and done == "data: [DONE]"


class Wire:
    """One request over bare ASGI, whose client can go away at any moment."""

    def __init__(self, app: Any, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        raw = json.dumps(body).encode()
        self.sent: list[dict[str, Any]] = []
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "scheme": "http", "headers": [], "client": ("c", 1), "server": ("s", 1), "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self.inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
async def test_case_45_a_client_that_goes_away_ends_its_request(stream: bool, queued: bool) -> None:
    engine = ScriptedEngine((LOOP,), gate=asyncio.Event())
    if not queued:
        engine.gate.set()
    app = build_app(engine)
    async with app.router.lifespan_context(app):
        await app.state.thinkfold.slot.loaded()
        for round_ in range(20):
            wire = Wire(app, chat_body(stream=stream, n=1 + round_ % 4, max_tokens=100_000))
            await eventually(lambda: engine.running == 1)
            for _ in range(round_):
                await asyncio.sleep(0)
            wire.leave()
            await asyncio.wait_for(wire.task, 5)
            assert engine.running == 0 and engine.aborted == round_ + 1


async def test_case_45_gone_before_the_body_arrived() -> None:
    engine = ScriptedEngine()
    app = build_app(engine)
    async with app.router.lifespan_context(app):
        await app.state.thinkfold.slot.loaded()
        wire = Wire(app, chat_body())
        wire.inbox = asyncio.Queue()
        wire.leave()
        wire.task.cancel()
        await asyncio.gather(wire.task, return_exceptions=True)
    assert not engine.calls


async def test_case_45_a_broken_pipe_closes_the_stream() -> None:
    closed = []

    async def numbers() -> Any:
        try:
            while True:
                yield b"x"
        finally:
            closed.append("events")

    async def close() -> None:
        closed.append("feed")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    await EventStream(numbers(), close)({}, None, send)
    assert closed == ["events", "feed"]


async def test_other_streams_go_on_when_one_client_leaves() -> None:
    engine = ScriptedEngine((LOOP,))
    app = build_app(engine)
    async with app.router.lifespan_context(app):
        await app.state.thinkfold.slot.loaded()
        stays = Wire(app, chat_body(stream=True, max_tokens=300))
        leaves = Wire(app, chat_body(stream=True, max_tokens=100_000))
        await eventually(lambda: engine.running == 2)
        leaves.leave()
        await asyncio.wait_for(stays.task, 20)
    text = b"".join(m.get("body", b"") for m in stays.sent).decode()
    assert text.count('"content":"a"') == 300 and text.endswith("[DONE]\n\n")


async def test_case_58_health_is_answered_while_a_huge_body_is_handled() -> None:
    """No clock here: health must be answered before the huge request is."""
    engine = ScriptedEngine()
    async with serving(engine) as client:
        await chat(client)
        body = json.dumps(chat_body(messages=[{"role": "user", "content": "<think>" * 3_000_000}])).encode()
        huge = asyncio.create_task(client.post("/v1/chat/completions", content=body))
        answered_before = 0
        while not huge.done():
            await asyncio.sleep(0.001)  # the client in memory never waits by itself
            assert (await client.get("/health")).status_code == 200
            answered_before += not huge.done()
        assert answered_before >= 1
        assert (await huge).status_code == 400


async def test_health_tells_held_pages_from_idle_cached_ones() -> None:
    async with serving(ScriptedEngine()) as client:
        told = (await client.get("/health")).json()
    assert told == {"status": "ok", "kv_pages": {"total": 64, "held": 5, "cached": 16, "free": 43}}


async def test_metrics() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client, serving(ScriptedEngine()) as other:
        await chat(client, stream=True)
        await chat(client, n=2)
        await chat(client, temperature=9)
        text = (await client.get("/metrics")).text
        untouched = (await other.get("/metrics")).text
    for line in (
        "thinkfold_time_to_first_token_seconds_count 2.0",
        "thinkfold_time_to_first_answer_token_seconds_count 2.0",
        "thinkfold_time_per_output_token_seconds_count 2.0",
        'thinkfold_errors_total{status="400"} 1.0',
        'thinkfold_pages{class="thinking"} 3.0',
        'thinkfold_pages{class="summary"} 2.0',
        "thinkfold_kv_use 0.078125",
        "thinkfold_kv_cached 0.25",
        "thinkfold_folds_total 5.0",
        "thinkfold_folds_refused_total 1.0",
        "thinkfold_folded_tokens_total 80.0",
        "thinkfold_swaps_total 2.0",
        "thinkfold_swapped_bytes_total 4096.0",
        'thinkfold_pressure_total{rung="cached"} 7.0',
        'thinkfold_pressure_total{rung="fold"} 5.0',
        "thinkfold_running 0.0",
        "thinkfold_ready 1.0",
    ):
        assert line in text, line
    assert "thinkfold_time_to_first_token_seconds_count 0.0" in untouched
