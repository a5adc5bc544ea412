"""`/v1/thinkfold/tenant`: forget all that is kept for the caller's; `/admin/tenants/{id}` does it for any."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.errors import ConflictError, UnsupportedError
from thinkfold.server.contract import Forgetting
from thinkfold.server.routing import statuses
from thinkfold.server.state import ServerState, owned_by, state_of, tenant_of
from thinkfold.server.turns import give_up_ahead

router = APIRouter()


class Forgotten(TypedDict):
    """How many of each kind are gone."""

    id: str
    object: Literal["thinkfold.tenant"]
    deleted: dict[str, int]


@router.delete("/v1/thinkfold/tenant", responses=statuses(409))
async def delete(request: Request) -> Forgotten:
    """Forget all that is kept for the caller's tenant."""
    return await forget(state_of(request), tenant_of(request))


@router.delete("/admin/tenants/{tenant}", responses=statuses(400, 409, 500, 503))
async def delete_any(request: Request, tenant: str) -> Forgotten:
    """Forget all that is kept for a tenant."""
    return await forget(state_of(request), tenant)


async def forget(state: ServerState, tenant: str) -> Forgotten:
    """How many of what went. Raises ConflictError while a response of the tenant runs: it would leave new traces."""
    engine = state.slot.require()
    if not isinstance(engine, Forgetting):
        raise UnsupportedError("tenant", "this engine cannot forget what it keeps for one")
    running = state.access.running[tenant]
    if running:
        raise ConflictError(f"{running} of the tenant's responses still run; cancel them, or wait for their end")
    await give_up_ahead(tenant)
    gone = {
        "responses": state.responses.delete_tenant(tenant),
        "sessions": state.sessions.delete_tenant(tenant),
        "step_answers": state.step_cache.delete_tenant(tenant),
        "conversations": state.conversations.delete_tenant(tenant),
        **await engine.forget(tenant, owned_by(tenant, ())),
    }
    return {"id": tenant, "object": "thinkfold.tenant", "deleted": gone}
