"""`/v1/models`: the one model served here and what it can do, readable for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Literal, NotRequired

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.engine.abilities import Ability
from thinkfold.engine.messages import ModelInfo
from thinkfold.fold import selectors
from thinkfold.server.contract import Engine, EngineSlot
from thinkfold.server.fields import check_model
from thinkfold.server.routing import statuses
from thinkfold.server.state import state_of
from thinkfold.types import EFFORT_BUDGETS, FOLD_PROFILES, UNLIMITED, FoldMode

router = APIRouter()


class Markers(TypedDict):
    start: str
    end: str


class ThinkingAbilities(TypedDict):
    """Markers, and which wishes about thinking are honoured; an effort without a limit is null."""

    markers: Markers
    can_be_off: bool
    efforts: dict[str, int | None]


class FoldAbilities(TypedDict):
    """Whether thinking can be folded, and how."""

    available: bool
    policy: NotRequired[str]
    policies: NotRequired[list[str]]
    profiles: NotRequired[list[str]]
    selectors: NotRequired[list[str]]
    swap: NotRequired[bool]


class KvCacheFacts(TypedDict):
    dtype: str
    fp8_error: float | None


class Abilities(TypedDict):
    """What is enforced here, and how much fits; `thinking` is null for a model that does not think.

    `capabilities` says by name what the engine does itself, what is done over it, and what there is no way to do.
    """

    engine: Literal["thinkfold", "openai"]
    capabilities: dict[str, Ability]
    family: str | None
    thinks: bool
    budget_enforced: bool
    default_thinking_budget: int
    sampling_defaults: dict[str, float | int]
    kv_capacity: int
    kv_cache: KvCacheFacts
    thinking: ThinkingAbilities | None
    fold: FoldAbilities


class ModelCard(TypedDict):
    """The served model, in OpenAI's and Anthropic's words, and what it can do."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int
    thinkfold: Abilities


class ModelList(TypedDict):
    """A list of one."""

    object: Literal["list"]
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The served model and what it can do."""
    card = _card(state_of(request).slot)
    return {"object": "list", "data": [card], "first_id": card["id"], "last_id": card["id"], "has_more": False}


@router.get("/v1/models/{name:path}", responses=statuses(404))
async def show_model(request: Request, name: str) -> ModelCard:
    """One model; there is one."""
    slot = state_of(request).slot
    check_model(slot.require(), name)
    return _card(slot)


def _card(slot: EngineSlot) -> ModelCard:
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
            "engine": model.engine,
            "capabilities": dict(model.abilities),
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


def _thinking(engine: Engine, model: ModelInfo) -> ThinkingAbilities:
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


def _fold(engine: Engine, model: ModelInfo) -> FoldAbilities:
    """Whether this model's thinking can be folded, and how."""
    if not model.thinks or model.abilities.get("fold") == "not available":
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
