"""`thinkfold serve`: the OpenAI-compatible server. The socket answers while the model loads."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from thinkfold.cli.engine_flags import add_engine_flags, engine_config
from thinkfold.errors import ParameterError
from thinkfold.types.checks import integer, number

if TYPE_CHECKING:
    import uvicorn

    from thinkfold.server.contract import EngineSlot
    from thinkfold.server.state import ServerOptions

ENGINE_DIED = 1
FOLD_LOG = "thinkfold.server.folds"  # one line a fold
_WATCH_S = 0.5
_GRACE_S = 10  # running requests may finish after a signal
_LAST_WORDS_S = 5  # then they get an error, which their clients have this long to read


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="serve a model with an OpenAI-compatible API", allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="pebble", help="a folder, a hub id, or pebble (default)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for any free one (default: 8000)")
    parser.add_argument(
        "--response-store-bytes",
        type=int,
        default=256 * 1024 * 1024,
        help="memory for stored responses, 0 for none (default: 268435456)",
    )
    parser.add_argument(
        "--response-ttl-s",
        type=float,
        default=3600.0,
        help="seconds that a response is stored since it was last used (default: 3600)",
    )
    parser.add_argument(
        "--secret-file",
        help="a file of at least 32 secret bytes that signs and seals thinking; servers that share it accept each "
        "other's (default: a secret that ends with the process)",
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal (0), until loading fails (raises) or the engine dies (1)."""
    config = engine_config(args)
    options = server_options(args)
    logging.getLogger(FOLD_LOG).setLevel(logging.INFO)
    sock = _listen(args.host, args.port)
    try:
        return asyncio.run(_serve(config, options, sock))
    finally:
        sock.close()


def server_options(args: argparse.Namespace) -> ServerOptions:
    """What the flags say about the HTTP side. Raises ParameterError for a bad secret and for numbers out of range."""
    from thinkfold.server.keyring import Keyring
    from thinkfold.server.state import ServerOptions

    integer("response_store_bytes", args.response_store_bytes, 0)
    number("response_ttl_s", args.response_ttl_s, 0, 10**9, open_low=True)
    return ServerOptions(
        response_store_bytes=args.response_store_bytes,
        response_ttl_s=args.response_ttl_s,
        keyring=Keyring.from_file(args.secret_file) if args.secret_file else Keyring(),
    )


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ParameterError("port", f"must be in [0, 65535], got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


async def _serve(config: Any, options: ServerOptions, sock: socket.socket) -> int:
    import uvicorn

    from thinkfold.engine.async_engine import AsyncEngine
    from thinkfold.server.app import build_app

    app = build_app(start=lambda: AsyncEngine.start(config), options=options)
    slot: EngineSlot = app.state.thinkfold.slot
    uvicorn_config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S + _LAST_WORDS_S)
    server = uvicorn.Server(uvicorn_config)
    watcher = asyncio.create_task(_watch(slot, server, _url(sock)))
    ender = asyncio.create_task(_end_requests(slot, server))
    try:
        await server.serve(sockets=[sock])
    finally:
        watcher.cancel()
        ender.cancel()
    await asyncio.wait({watcher})
    return 0 if watcher.cancelled() else watcher.result()


async def _watch(slot: EngineSlot, server: uvicorn.Server, url: str) -> int:
    """Say when the model is ready, and end the server if the engine does not live."""
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        engine = await slot.loaded()
        print(f"thinkfold serves {engine.config.served_model_name or engine.model.name} at {url}", flush=True)
        while engine.health().alive:
            await asyncio.sleep(_WATCH_S)
        if server.should_exit:
            return 0
        print(f"thinkfold serve: the engine has died: {engine.health().reason}", flush=True)
        return ENGINE_DIED
    finally:
        server.should_exit = True


async def _end_requests(slot: EngineSlot, server: uvicorn.Server) -> None:
    """After a signal, requests that outlive the grace get a final error instead of a cut connection."""
    while not server.should_exit:
        await asyncio.sleep(_WATCH_S)
    await asyncio.sleep(_GRACE_S)
    await slot.close()


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
