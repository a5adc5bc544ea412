"""What every route of one app shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fastapi import Request

from thinkfold.engine.sessions import SessionStore
from thinkfold.server.access.gate import Access
from thinkfold.server.agents.step_cache import StepCache
from thinkfold.server.contract import EngineSlot
from thinkfold.server.drift import Conversations
from thinkfold.server.keyring import Keyring
from thinkfold.server.metrics import ServerMetrics
from thinkfold.server.responses.store import ResponseStore
from thinkfold.server.tiers import TierTable
from thinkfold.types import ControlParams, Prices


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits of the HTTP side. `keepalive_s`: silence after which a stream sends a sign of life.

    Finished responses are stored for `response_ttl_s` seconds since they were last used; with 0 bytes
    none are. `cors_origins` are the origins whose pages may call; none by default. `page` serves ours at `/`.
    Agent sessions live for `session_ttl_s` seconds since their last call, kept answers of plan steps for
    `step_cache_ttl_s`. `control` is for requests that ask for no early stopping themselves, nor by their tier.
    `log_requests`: each that ends is a line of the log, with its costs, or also with its texts.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    keepalive_s: float = 15.0
    max_prompts: int = 128
    response_store_bytes: int = 256 * 1024 * 1024
    response_ttl_s: float = 3600.0
    keyring: Keyring = field(default_factory=Keyring)
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    tiers: TierTable | None = None
    prices: Prices = field(default_factory=Prices)
    max_sessions: int = 10_000
    session_ttl_s: float = 3600.0
    step_cache_answers: int = 4096
    step_cache_ttl_s: float = 3600.0
    control: ControlParams | None = None
    log_requests: Literal["none", "costs", "text"] = "none"


@dataclass(frozen=True, slots=True)
class ServerState:
    slot: EngineSlot
    metrics: ServerMetrics
    options: ServerOptions
    responses: ResponseStore
    access: Access
    sessions: SessionStore
    step_cache: StepCache
    conversations: Conversations


def state_of(request: Request) -> ServerState:
    """The state that `build_app` put into the app."""
    return request.app.state.thinkfold


def tenant_of(request: Request) -> str:
    """Whose request it is, as whoever checked its key wrote into `request.state`; "" where nobody asks."""
    return getattr(request.state, "tenant", "")


def owned(request: Request, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The namespace of a request's work: its tenant's, and inside it the request's own `labels`."""
    return owned_by(tenant_of(request), labels)


def owned_by(tenant: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The same for a tenant who is known; "" is nobody."""
    return (f"tenant={tenant}", *labels) if tenant else labels
