"""What every route of one app shares."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from thinkfold.server.contract import EngineSlot
from thinkfold.server.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits of the HTTP side. `keepalive_s`: silence after which a stream sends a comment."""

    max_body_bytes: int = 64 * 1024 * 1024
    keepalive_s: float = 15.0
    max_prompts: int = 128


@dataclass(frozen=True, slots=True)
class ServerState:
    slot: EngineSlot
    metrics: ServerMetrics
    options: ServerOptions


def state_of(request: Request) -> ServerState:
    """The state that `build_app` put into the app."""
    return request.app.state.thinkfold
