"""`thinkfold serve`: the OpenAI-compatible server. The socket answers while the model loads."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinkfold.cli.engine_flags import POSITIONAL, add_engine_flags, add_flags
from thinkfold.cli.settings import Resolved, ServeSettings, resolve
from thinkfold.errors import ParameterError
from thinkfold.types import ControlParams, Prices

if TYPE_CHECKING:
    import uvicorn

    from thinkfold.engine.async_engine import AsyncEngine
    from thinkfold.server.access.gate import Access
    from thinkfold.server.contract import EngineSlot
    from thinkfold.server.prefixes import WarmPrefix
    from thinkfold.server.state import ServerOptions

ENGINE_DIED, INTERRUPTED = 1, 130
# Loggers of one line a fold, a drift, a stop and, where they are asked for, a request.
TOLD = tuple(f"thinkfold.{name}" for name in ("server.folds", "server.drift", "engine.steering", "server.request_log"))
_WATCH_S = 0.5
_LAST_WORDS_S = 5  # after the drain requests get an error, which their clients have this long to read


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model with an OpenAI-compatible API",
        description="Every option may also stand in a TOML file (--config) under its name, or in the environment as "
        "THINKFOLD_<NAME>. Flags beat the environment, which beats the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(POSITIONAL, nargs="?", help="a folder, a hub id, or pebble (default)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings (default: THINKFOLD_CONFIG)")
    parser.add_argument("--print-config", action="store_true", help="show the effective settings as TOML, and end")
    add_flags(parser, ServeSettings, "server", given_only=True)
    add_engine_flags(parser, given_only=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal has drained it (0), until loading fails (raises) or the engine dies (1).

    A second Ctrl-C ends it at once (130).
    """
    settings = resolve(args, os.environ)
    if "print_config" in args:
        print(settings.toml(), end="")
        return 0
    for line in settings.explained():
        print(line, flush=True)
    options, access = server_options(settings.serve, settings.prices), access_rules(settings.serve, os.environ)
    for name in TOLD:
        logging.getLogger(name).setLevel(logging.INFO)
    prefixes = warm_prefixes(settings.serve)
    sock = listen(settings.serve.host, settings.serve.port)
    try:
        return asyncio.run(_serve(settings, options, access, prefixes, sock))
    finally:
        sock.close()


def server_options(settings: ServeSettings, prices: Prices | None = None) -> ServerOptions:
    """The HTTP side's limits. Raises ParameterError for a secret or tiers that cannot be used."""
    from thinkfold.server.keyring import Keyring
    from thinkfold.server.state import ServerOptions
    from thinkfold.server.tiers import load_tiers

    return ServerOptions(
        max_body_bytes=settings.max_body_bytes,
        response_store_bytes=settings.response_store_bytes,
        response_ttl_s=settings.response_ttl_s,
        keyring=Keyring.from_file(settings.secret_file) if settings.secret_file else Keyring(),
        cors_origins=settings.cors_origins,
        page=settings.page,
        tiers=load_tiers(settings.tiers) if settings.tiers else None,
        prices=prices or Prices(),
        max_sessions=settings.max_sessions,
        session_ttl_s=settings.session_ttl_s,
        step_cache_answers=settings.step_cache_answers,
        step_cache_ttl_s=settings.step_cache_ttl_s,
        control=ControlParams(settings.early_stop),
        log_requests=settings.log_requests,
    )


def access_rules(settings: ServeSettings, environ: Mapping[str, str]) -> Access:
    """Who may call. Raises ParameterError for keys that cannot be read."""
    from thinkfold.server.access.gate import Access
    from thinkfold.server.access.keys import load_keys

    return Access(
        keys=load_keys(settings.api_keys_file, environ),
        open_routes=settings.open_routes,
        max_header_bytes=settings.max_header_bytes,
    )


def warm_prefixes(settings: ServeSettings) -> list[WarmPrefix]:
    """What to compute and pin before the server is ready. Raises ParameterError for a file that cannot be read."""
    from thinkfold.server.prefixes import read_warm_file

    return read_warm_file(settings.warm) if settings.warm else []


def listen(host: str, port: int) -> socket.socket:
    """A socket for the server, port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit it. asyncio sets it only where it has made the socket, and without it the second of two small
    # writes, a reply's body behind its headers, waits 40 ms for the first one's acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def _serve(
    settings: Resolved,
    options: ServerOptions,
    access: Access,
    prefixes: Sequence[WarmPrefix],
    sock: socket.socket,
) -> int:
    import uvicorn

    from thinkfold.engine.async_engine import AsyncEngine
    from thinkfold.server.app import build_app
    from thinkfold.server.prefixes import warm

    remote = settings.serve.engine == "openai"

    async def start() -> AsyncEngine:
        engine = await (_start_remote(settings, options) if remote else AsyncEngine.start(settings.engine))
        try:
            await warm(engine, prefixes)
        except BaseException:
            await engine.stop()
            raise
        return engine

    app = build_app(start=start, options=options, access=access)
    slot: EngineSlot = app.state.thinkfold.slot
    drain_s = settings.serve.drain_s
    uvicorn_config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=math.ceil(drain_s) + _LAST_WORDS_S,
        h11_max_incomplete_event_size=2 * access.max_header_bytes,
    )
    server = uvicorn.Server(uvicorn_config)
    watcher = asyncio.create_task(_watch(slot, server, _url(sock)))
    ender = asyncio.create_task(_end_requests(slot, server, access, drain_s))
    try:
        with _drained_signals():
            await server.serve(sockets=[sock])
    finally:
        watcher.cancel()
        ender.cancel()
    await asyncio.wait({watcher})
    if server.force_exit:
        return INTERRUPTED
    return 0 if watcher.cancelled() else watcher.result()


async def _start_remote(settings: Resolved, options: ServerOptions) -> AsyncEngine:
    """The policy over the server that the settings name. Raises ParameterError, also where its client is missing."""
    try:
        from thinkfold.deploy.remote.engine import start_remote
        from thinkfold.deploy.remote.http import Remote
        from thinkfold.deploy.remote.service import check_service
    except ModuleNotFoundError as error:
        raise ParameterError("engine", f"openai needs {error.name}: pip install 'thinkfold[remote]'") from None

    given = settings.serve
    assert given.base_url is not None, "the settings were checked"
    remote = Remote(given.base_url, given.remote_api_key, given.remote_model, given.remote_timeout_s)
    engine = await start_remote(settings.engine, remote)
    try:
        check_service(engine, options)
    except BaseException:
        await engine.stop()
        raise
    return engine


@contextmanager
def _drained_signals() -> Iterator[None]:
    """uvicorn raises its signal again once it has drained; here that finds nobody, so the exit code is ours."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


async def _watch(slot: EngineSlot, server: uvicorn.Server, url: str) -> int:
    """Say when the model is ready, and end the server if the engine does not live."""
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        engine = await slot.loaded()
        freeze_loaded()
        print(f"thinkfold serves {engine.config.served_model_name or engine.model.name} at {url}", flush=True)
        while engine.health().alive:
            await asyncio.sleep(_WATCH_S)
        if server.should_exit:
            return 0
        print(f"thinkfold serve: the engine has died: {engine.health().reason}", flush=True)
        return ENGINE_DIED
    finally:
        server.should_exit = True


async def _end_requests(slot: EngineSlot, server: uvicorn.Server, access: Access, drain_s: float) -> None:
    """After a signal nothing new begins; requests that outlive the drain get a final error, not a cut connection."""
    while not server.should_exit:
        await asyncio.sleep(_WATCH_S)
    access.draining = True
    await asyncio.sleep(drain_s)
    await slot.close()


def freeze_loaded() -> None:
    """Take what is loaded out of the collector's sight: one full collection of it stops all streams for .3 s."""
    gc.collect()
    gc.freeze()


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
