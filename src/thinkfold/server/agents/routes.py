"""`/v1/thinkfold/sessions/{id}`: look at an agent session, forget it. Each belongs to its tenant."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.errors import NotFoundError
from thinkfold.server.contract import Forgetting
from thinkfold.server.routing import statuses
from thinkfold.server.state import owned_by, state_of, tenant_of
from thinkfold.server.turns import give_up_ahead

router = APIRouter()


class Session(TypedDict):
    """Where an agent session stands, in thinking tokens; `cached_answers` of its `calls` were kept ones."""

    id: str
    object: Literal["thinkfold.session"]
    total_budget: int
    spent: int
    remaining: int
    calls: int
    cached_answers: int
    expires_in_s: float


class DeletedSession(TypedDict):
    """`removed` says how many of each kind are gone."""

    id: str
    object: Literal["thinkfold.session"]
    deleted: bool
    removed: dict[str, int]


@router.get("/v1/thinkfold/sessions/{session_id}", responses=statuses(404))
async def show(request: Request, session_id: str) -> Session:
    """Budget, what is spent, and when it is forgotten."""
    shown = state_of(request).sessions.show(tenant_of(request), session_id)
    return {
        "object": "thinkfold.session",
        "id": shown.id,
        "total_budget": shown.total_budget,
        "spent": shown.spent,
        "remaining": shown.remaining,
        "calls": shown.calls,
        "cached_answers": shown.cached_answers,
        "expires_in_s": shown.expires_in_s,
    }


@router.delete("/v1/thinkfold/sessions/{session_id}", responses=statuses(404))
async def delete(request: Request, session_id: str) -> DeletedSession:
    """Forget a session and all that is kept for it; its calls end as cancelled."""
    state, tenant = state_of(request), tenant_of(request)
    engine = state.slot.require()
    known = state.sessions.delete(tenant, session_id)  # first: what ends from here on leaves nothing
    await give_up_ahead(tenant, session_id)
    removed = {
        "responses": state.responses.delete_session(tenant, session_id),
        "step_answers": state.step_cache.delete_session(tenant, session_id),
        "conversations": state.conversations.delete_session(tenant, session_id),
    }
    if isinstance(engine, Forgetting):
        removed |= await engine.forget(tenant, owned_by(tenant, ()), session_id)
    if not known and not any(removed.values()):
        raise NotFoundError(f"there is no session {session_id!r:.130}")
    return {"id": session_id, "object": "thinkfold.session", "deleted": True, "removed": removed}
