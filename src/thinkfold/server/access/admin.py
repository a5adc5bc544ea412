"""`/admin`: for operators, behind keys with `admin = true` (the gate sees to it)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from thinkfold.server.state import state_of

router = APIRouter(prefix="/admin")


@router.get("/keys")
async def keys(request: Request) -> dict[str, Any]:
    """What every key has used."""
    access = state_of(request).access
    return {"object": "list", "data": access.quotas.report(access.keys.keys if access.keys else ())}


@router.post("/drain")
async def drain(request: Request) -> dict[str, Any]:
    """Take no new requests; those that run go on. There is no way back but a restart."""
    state_of(request).access.draining = True
    return {"draining": True}
