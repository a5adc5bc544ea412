"""`/health`: should this process live? `/ready`: should it get traffic?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from thinkfold.engine.messages import KVPages
from thinkfold.server.contract import EngineSlot
from thinkfold.server.replies import Shows
from thinkfold.server.state import state_of

router = APIRouter()


class Condition(TypedDict):
    """Whether all is well, and why not. `/health` tells the pages of the KV pool."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]
    kv_pages: NotRequired[Annotated[dict[str, int], Shows(KVPages)]]


def condition(slot: EngineSlot) -> tuple[bool, bool, str]:
    """(alive, ready, reason). A loading engine is alive and not ready."""
    if slot.failure is not None:
        return False, False, f"the model could not be loaded: {slot.failure}"
    if slot.engine is None:
        return True, False, "loading"
    health = slot.engine.health()
    return health.alive, health.alive and health.ready, health.reason


@router.get("/health", responses={200: {"model": Condition}, 503: {"model": Condition}})
async def health(request: Request) -> JSONResponse:
    """200 while the process should live; pages of the KV pool."""
    slot = state_of(request).slot
    alive, _, reason = condition(slot)
    return _answer(alive, reason, None if slot.engine is None else asdict(slot.engine.stats().kv_pages))


@router.get("/ready", responses={200: {"model": Condition}, 503: {"model": Condition}})
async def ready(request: Request) -> JSONResponse:
    """200 while it should get traffic."""
    state = state_of(request)
    _, is_ready, reason = condition(state.slot)
    if state.access.draining:
        is_ready, reason = False, "draining"
    return _answer(is_ready, reason)


def _answer(good: bool, reason: str, pages: dict[str, int] | None = None) -> JSONResponse:
    told: Condition = {"status": "ok"} if good else {"status": "unavailable", "reason": reason}
    if pages is not None:
        told["kv_pages"] = pages
    return JSONResponse(told, 200 if good else 503)
