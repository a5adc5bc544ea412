"""The HTTP application: routes, errors, and the engine's life."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from thinkfold.engine.sessions import SessionStore
from thinkfold.server import (
    chat,
    completions,
    control,
    engine_view,
    errors,
    health,
    metrics,
    models,
    openapi,
    partial,
    prefixes,
    tenants,
)
from thinkfold.server.access import admin
from thinkfold.server.access.gate import Access, Gate
from thinkfold.server.agents import routes as agent_routes
from thinkfold.server.agents.step_cache import StepCache
from thinkfold.server.contract import Engine, EngineSlot
from thinkfold.server.drift import Conversations
from thinkfold.server.messages import routes as messages
from thinkfold.server.messages.errors import error_body as messages_error
from thinkfold.server.messages.shapes import MessagesError
from thinkfold.server.metrics import ServerMetrics
from thinkfold.server.responses import routes as response_routes
from thinkfold.server.responses.store import ResponseStore
from thinkfold.server.state import ServerOptions, ServerState
from thinkfold.server.ui import routes as page


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
    if options.tiers is not None:
        options.tiers.check_keys(access.keys)
    agents = (
        SessionStore(options.max_sessions, options.session_ttl_s),
        StepCache(options.step_cache_answers, options.step_cache_ttl_s),
    )
    counts = ServerMetrics(slot)
    conversations = Conversations(lambda kind: counts.drift.labels(kind).inc())
    app.state.thinkfold = ServerState(slot, counts, options, responses, access, *agents, conversations)
    apis = (chat, completions, messages, response_routes, control, partial, prefixes, agent_routes, tenants, models)
    routers = [each.router for each in (*apis, health, metrics, engine_view, admin, openapi)]
    routers += [page.router] if options.page else []
    for router in routers:  # not included: FastAPI would build every schema again at the first request
        app.router.routes.extend(router.routes)
    app.state.document = openapi.Document(routers, access, {"/v1/messages": MessagesError}, page.ROUTES)
    bodies = {"/v1/messages": messages_error}
    errors.install(app, bodies)
    app.add_middleware(
        Gate, access=access, answer=errors.refusal(app, bodies), public=page.PATHS if options.page else ()
    )
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app
