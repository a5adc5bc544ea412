"""`/v1/models`: the one model served here and what it can do, readable for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from thinkfold.engine.messages import ModelInfo
from thinkfold.fold import selectors
from thinkfold.server.contract import Engine, EngineSlot
from thinkfold.server.fields import check_model
from thinkfold.server.state import state_of
from thinkfold.types import EFFORT_BUDGETS, FOLD_PROFILES, UNLIMITED, FoldMode

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model and what it can do."""
    card = _card(state_of(request).slot)
    page = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
    return {"object": "list", "data": [card], **page}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """One model; there is one."""
    slot = state_of(request).slot
    check_model(slot.require(), name)
    return _card(slot)


def _card(slot: EngineSlot) -> dict[str, Any]:
    engine = slot.require()
    model = engine.model
    name = check_model(engine, None)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "thinkfold",
        "max_model_len": model.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": model.max_prompt_len,
        "max_tokens": model.max_model_len,
        "thinkfold": {
            "family": model.family,
            "thinks": model.thinks,
            "budget_enforced": model.budget_enforced,
            "default_thinking_budget": engine.config.default_thinking_budget,
            "sampling_defaults": dict(slot.sampling_defaults),
            "kv_capacity": model.kv_capacity,
            "kv_cache": {"dtype": model.kv_dtype, "fp8_error": model.fp8_error},
            "thinking": _thinking(engine, model) if model.thinks else None,
            "fold": _fold(engine, model),
        },
    }


def _thinking(engine: Engine, model: ModelInfo) -> dict[str, Any]:
    """Markers, and which wishes about thinking are honoured. An effort without a limit is null."""
    markers = engine.prompts.markers
    can_be_off = model.budget_enforced or engine.prompts.has_thinking_switch
    honoured = {UNLIMITED, 0} if can_be_off else {UNLIMITED}
    kept = {name: budget for name, budget in EFFORT_BUDGETS.items() if model.budget_enforced or budget in honoured}
    return {
        "markers": {"start": markers.start, "end": markers.end},
        "can_be_off": can_be_off,
        "efforts": {name: None if budget == UNLIMITED else budget for name, budget in kept.items()},
    }


def _fold(engine: Engine, model: ModelInfo) -> dict[str, Any]:
    """Whether this model's thinking can be folded, and how."""
    if not model.thinks:
        return {"available": False}
    config = engine.config
    return {
        "available": True,
        "policy": config.fold_policy,
        "policies": [mode.value for mode in FoldMode],
        "profiles": list(FOLD_PROFILES),
        "selectors": list(selectors.names()),
        "swap": config.swap_space_bytes > 0,
    }
