"""`/health`: should this process live? `/ready`: should it get traffic?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from thinkfold.server.contract import EngineSlot
from thinkfold.server.state import state_of

router = APIRouter()


def condition(slot: EngineSlot) -> tuple[bool, bool, str]:
    """(alive, ready, reason). A loading engine is alive and not ready."""
    if slot.failure is not None:
        return False, False, f"the model could not be loaded: {slot.failure}"
    if slot.engine is None:
        return True, False, "loading"
    health = slot.engine.health()
    return health.alive, health.alive and health.ready, health.reason


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the process should live; pages of the KV pool."""
    slot = state_of(request).slot
    alive, _, reason = condition(slot)
    return _answer(alive, reason, {} if slot.engine is None else {"kv_pages": asdict(slot.engine.stats().kv_pages)})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while it should get traffic."""
    state = state_of(request)
    _, is_ready, reason = condition(state.slot)
    if state.access.draining:
        is_ready, reason = False, "draining"
    return _answer(is_ready, reason, {})


def _answer(good: bool, reason: str, more: dict[str, Any]) -> JSONResponse:
    status = {"status": "ok"} if good else {"status": "unavailable", "reason": reason}
    return JSONResponse({**status, **more}, 200 if good else 503)
