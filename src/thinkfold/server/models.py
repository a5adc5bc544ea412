"""`/v1/models`: the one model served here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from thinkfold.server.contract import EngineSlot
from thinkfold.server.fields import check_model
from thinkfold.server.state import state_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_card(state_of(request).slot)]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    slot = state_of(request).slot
    check_model(slot.require(), name)
    return _card(slot)


def _card(slot: EngineSlot) -> dict[str, Any]:
    engine = slot.require()
    model = engine.model
    return {
        "id": check_model(engine, None),
        "object": "model",
        "created": 0,
        "owned_by": "thinkfold",
        "max_model_len": model.max_model_len,
        "thinkfold": {
            "family": model.family,
            "thinks": model.thinks,
            "budget_enforced": model.budget_enforced,
            "default_thinking_budget": engine.config.default_thinking_budget,
            "sampling_defaults": dict(slot.sampling_defaults),
        },
    }
