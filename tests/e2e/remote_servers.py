"""Servers to put the policy over: llama.cpp's, started here where it is installed, and a proxy that spoils answers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from conftest import Served, run_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote.engine import start_remote
from thinkfold.deploy.remote.http import Remote

ROOT = Path(__file__).parents[2]
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs pip install 'llama-cpp-python[server]'"
)


def over(url: str, **config: Any) -> Iterator[Served]:
    """Our server over the one at `url`."""
    yield from run_engine(lambda: start_remote(EngineConfig(**config), Remote(f"{url}/v1", timeout_s=60)))


@contextmanager
def llama_server(file: Path, **flags: Any) -> Iterator[str]:
    """llama.cpp's server with Pebble; yields its address."""
    if not file.exists():
        subprocess.run([sys.executable, ROOT / "scripts" / "pebble_gguf.py", file], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"model": file, "host": "127.0.0.1", "port": port, "n_ctx": 4096, "n_threads": 1, "verbose": False}
    given |= {"interrupt_requests": False, **flags}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    log = file.with_suffix(f".{port}.log")
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "llama_cpp.server", *words], stdout=out, stderr=out)
    try:
        _wait_for(f"http://127.0.0.1:{port}/v1/models", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    waiter = threading.Event()
    for _ in range(1200):
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        waiter.wait(0.05)
    pytest.fail(f"{url} never answered: {log.read_text()}")


@dataclass
class Spoiler:
    """Passes requests on to a real server. `fault` spoils completions that stream; `open` are those under way.

    `refuse` is a status to answer with; `cut`, `junk` and `hang` spoil the stream after `after` events.
    """

    target: str
    fault: str = ""
    status: int = 200
    after: int = 3
    open: int = 0
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    async def handle(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path
        if self.fault == "refuse" and path.endswith("completions"):
            return JSONResponse({"error": {"message": "not now"}}, self.status, self.headers)
        if b'"stream":true' not in body.replace(b" ", b""):
            async with httpx.AsyncClient(timeout=60) as client:
                answer = await client.request(request.method, self.target + path, content=body)
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        return StreamingResponse(self._stream(path, body), media_type="text/event-stream")

    async def _stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        self.open += 1
        count = 0
        try:
            async with (
                httpx.AsyncClient(timeout=60) as client,
                client.stream("POST", self.target + path, content=body) as answer,
            ):
                async for line in answer.aiter_lines():
                    if not line:
                        continue
                    count += 1
                    if count > self.after and self.fault == "cut":
                        return
                    if count > self.after and self.fault == "junk":
                        line = 'data: {"choices": ['
                    if count > self.after and self.fault == "hang":
                        await asyncio.Event().wait()
                    yield line.encode() + b"\n\n"
        finally:
            self.open -= 1


@contextmanager
def spoiling(target: str) -> Iterator[Spoiler]:
    """A proxy before the server at `target`, on a socket of its own."""
    spoiler = Spoiler(target)
    app = Starlette(routes=[Route("/{path:path}", spoiler.handle, methods=["GET", "POST"])])
    sock = socket.create_server(("127.0.0.1", 0))
    spoiler.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield spoiler
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()
