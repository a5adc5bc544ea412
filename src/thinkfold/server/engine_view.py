"""`/v1/thinkfold/engine`: the engine of this moment as one small JSON object, for the page and `thinkfold top`."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.engine.messages import EngineStats, ModelInfo
from thinkfold.server.fields import check_model
from thinkfold.server.health import condition
from thinkfold.server.replies import DriftRecord
from thinkfold.server.state import state_of, tenant_of

router = APIRouter()


class HostPages(TypedDict):
    total: int
    used: int


class PoolView(TypedDict):
    """Pages of the pool by class, and of the host tier; requests have those that are `held`."""

    total: int
    held: int
    free: int
    by_class: dict[str, int]
    host: HostPages
    page_size: int
    page_bytes: int


class PrefixView(TypedDict):
    queried_tokens: int
    hit_tokens: int


class FoldView(TypedDict):
    done: int
    refused: int
    tokens: int
    quantised: int


class EngineView(TypedDict):
    """Gauges of now and totals since the start. Rates come from two answers and `clock_s`, the server's own clock.

    `drift` are the latest of the caller's tenant, the newest first.
    """

    object: Literal["thinkfold.engine"]
    model: str
    ready: bool
    reason: str
    clock_s: float
    running: int
    waiting: int
    pages: PoolView
    prefix: PrefixView
    folds: FoldView
    drift: list[DriftRecord]
    pressure: dict[str, int]
    preemptions: int
    totals: dict[str, int | float]


_TOTALS = (
    "steps",
    "generated_tokens",
    "thinking_tokens",
    "answer_tokens",
    "discarded_tokens",
    "recomputed_tokens",
    "kv_byte_seconds",
)


@router.get("/v1/thinkfold/engine")
async def show_engine(request: Request) -> EngineView:
    """Gauges of now and totals since the start. `clock_s` is the server's own clock: rates come from two answers."""
    state = state_of(request)
    engine = state.slot.require()
    _, ready, reason = condition(state.slot)
    stats = engine.stats()
    return {
        "object": "thinkfold.engine",
        "model": check_model(engine, None),
        "ready": ready and not state.access.draining,
        "reason": reason or ("draining" if state.access.draining else ""),
        "clock_s": time.monotonic(),
        "running": stats.running,
        "waiting": stats.waiting,
        "pages": _pages(stats, engine.model),
        "prefix": {"queried_tokens": stats.prefix_queried_tokens, "hit_tokens": stats.prefix_hit_tokens},
        "folds": {
            "done": stats.folds,
            "refused": stats.folds_refused,
            "tokens": stats.folded_tokens,
            "quantised": stats.quantised,
        },
        "drift": state.conversations.latest(tenant_of(request)),
        "pressure": stats.pressure,
        "preemptions": stats.preemptions,
        "totals": {name: getattr(stats, name) for name in _TOTALS},
    }


def _pages(stats: EngineStats, model: ModelInfo) -> PoolView:
    """Pages of the pool by class, and of the host tier; requests have those that are `held`."""
    use = stats.kv_pages
    return {
        "total": use.total,
        "held": use.held,
        "free": use.free,
        "by_class": stats.pages_by_class,
        "host": {"total": stats.host_pages, "used": stats.host_pages_used},
        "page_size": model.page_size,
        "page_bytes": model.page_bytes,
    }
