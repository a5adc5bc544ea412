"""`/admin`: for operators, behind keys with `admin = true` (the gate sees to it)."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.server.access.quotas import KeyUsage
from thinkfold.server.state import state_of

router = APIRouter(prefix="/admin")


class KeyList(TypedDict):
    """What every key has used."""

    object: Literal["list"]
    data: list[KeyUsage]


class Draining(TypedDict):
    draining: bool


@router.get("/keys")
async def keys(request: Request) -> KeyList:
    """What every key has used."""
    access = state_of(request).access
    return {"object": "list", "data": access.quotas.report(access.keys.keys if access.keys else ())}


@router.post("/drain")
async def drain(request: Request) -> Draining:
    """Take no new requests; those that run go on. There is no way back but a restart."""
    state_of(request).access.draining = True
    return {"draining": True}
