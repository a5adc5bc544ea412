"""`/v1/thinkfold/sessions/{id}`: look at an agent session, forget it. Each belongs to its tenant."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.server.routing import statuses
from thinkfold.server.state import state_of, tenant_of

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
    id: str
    object: Literal["thinkfold.session"]
    deleted: bool


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
    """Forget a session, and what was said in it."""
    state, tenant = state_of(request), tenant_of(request)
    state.sessions.delete(tenant, session_id)
    state.conversations.delete_session(tenant, session_id)
    return {"id": session_id, "object": "thinkfold.session", "deleted": True}
