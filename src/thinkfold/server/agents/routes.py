"""`/v1/thinkfold/sessions/{id}`: look at an agent session, forget it. Each belongs to its tenant."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from thinkfold.server.state import state_of, tenant_of

router = APIRouter()


@router.get("/v1/thinkfold/sessions/{session_id}")
async def show(request: Request, session_id: str) -> dict[str, Any]:
    """Budget, what is spent, and when it is forgotten."""
    shown = state_of(request).sessions.show(tenant_of(request), session_id)
    return {"object": "thinkfold.session", **asdict(shown)}


@router.delete("/v1/thinkfold/sessions/{session_id}")
async def delete(request: Request, session_id: str) -> dict[str, Any]:
    """Forget a session."""
    state_of(request).sessions.delete(tenant_of(request), session_id)
    return {"id": session_id, "object": "thinkfold.session", "deleted": True}
