"""The HTTP application: routes, errors, and the engine's life."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from thinkfold.server import chat, completions, control, errors, health, metrics, models, partial
from thinkfold.server.access import admin
from thinkfold.server.access.gate import Access, Gate
from thinkfold.server.contract import Engine, EngineSlot
from thinkfold.server.messages import routes as messages
from thinkfold.server.messages.errors import error_body as messages_error
from thinkfold.server.metrics import ServerMetrics
from thinkfold.server.responses import routes as response_routes
from thinkfold.server.responses.store import ResponseStore
from thinkfold.server.state import ServerOptions, ServerState


def build_app(
    engine: Engine | None = None,
    *,
    start: Callable[[], Awaitable[Engine]] | None = None,
    options: ServerOptions | None = None,
    access: Access | None = None,
) -> FastAPI:
    """An app around a running `engine`, or one that `start` loads while the socket answers.

    The app stops the engine when it shuts down.
    """
    if (engine is None) == (start is None):
        raise ValueError("give either engine or start")

    async def given() -> Engine:
        assert engine is not None
        return engine

    slot = EngineSlot(start or given)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        slot.begin()
        yield
        await slot.close()

    app = FastAPI(title="thinkfold", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    options = options or ServerOptions()
    responses = ResponseStore(options.response_store_bytes, options.response_ttl_s)
    access = access or Access()
    app.state.thinkfold = ServerState(slot, ServerMetrics(slot), options, responses, access)
    for module in (chat, completions, messages, response_routes, control, partial, models, health, metrics, admin):
        app.include_router(module.router)
    bodies = {"/v1/messages": messages_error}
    errors.install(app, bodies)
    app.add_middleware(Gate, access=access, answer=errors.refusal(app, bodies))
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app
