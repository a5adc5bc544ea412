"""Real servers on real sockets around the real engine: a small model with random weights, and Pebble itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import openai
import pytest
import uvicorn

from tests.small_pebble import small_pebble
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.messages import EngineStats
from thinkfold.server.access.gate import Access
from thinkfold.server.app import build_app
from thinkfold.server.state import ServerOptions

DUMMY = {
    "model": small_pebble(),
    "served_model_name": "pebble",
    "load_format": "dummy",
    "seed": 2,
    "max_model_len": 2048,
    "kv_cache_bytes": 64 * 1024 * 1024,
}


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    url: str
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop

    def tasks(self) -> int:
        """Tasks of the server's loop."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(10)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)


def run_server(config: EngineConfig, access: Access | None = None) -> Iterator[Served]:
    """Serve `config` from a thread until the generator is closed."""
    yield from run_engine(lambda: AsyncEngine.start(config), access=access)


def run_engine(
    start: Callable[[], Awaitable[AsyncEngine]], options: ServerOptions | None = None, access: Access | None = None
) -> Iterator[Served]:
    """Serve the engine that `start` makes, likewise."""
    app = build_app(start=start, options=options, access=access)
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # the main thread has loops of its own
    thread = threading.Thread(target=lambda: runner.run(server.serve(sockets=[sock])), daemon=True)
    loop = runner.get_loop()
    thread.start()
    slot = app.state.thinkfold.slot
    waiter = threading.Event()
    for _ in range(1200):
        if slot.engine is not None or slot.failure is not None:
            break
        waiter.wait(0.05)
    assert slot.engine is not None, slot.failure
    try:
        yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", slot.engine, loop)
    finally:
        server.should_exit = True
        thread.join(30)
        runner.close()
        sock.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    yield from run_server(EngineConfig(**DUMMY))


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def narrow() -> Iterator[Served]:
    """One request at a time, one may wait."""
    yield from run_server(EngineConfig(**DUMMY, max_num_seqs=1, max_waiting=1))


@pytest.fixture(scope="session")
def pebble() -> Iterator[Served]:
    """The trained model."""
    yield from run_server(EngineConfig(kv_cache_bytes=64 * 1024 * 1024))
