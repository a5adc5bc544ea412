"""`/v1/thinkfold/responses/{id}/control`: orders to a response that is being written.

The id is that of the reply, as its stream's first chunk tells it; a completion request of several
prompts has one for each, with `-0`, `-1` … behind it. A response belongs to the namespace of its
request: to anybody else it is not there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.body import StrictModel
from thinkfold.server.contract import Controllable, Engine
from thinkfold.server.fields import namespace_of
from thinkfold.server.replies import Shows
from thinkfold.server.routing import body_of, statuses
from thinkfold.server.state import owned, state_of
from thinkfold.types import Handle

router = APIRouter()


class Effect(TypedDict):
    """What some actions tell: the new budget, the place of what was injected, a fork's handle, what a cancel keeps."""

    budget: NotRequired[int | None]
    output_tokens: NotRequired[int]
    handle: NotRequired[Annotated[dict[str, Any], Shows(Handle)]]
    keep_partial: NotRequired[bool]


class Controlled(Effect):
    """An order that was carried out."""

    id: str
    object: Literal["thinkfold.control"]
    action: Action


Action = Literal["end_thinking", "set_budget", "inject", "pause", "resume", "fork", "cancel"]


class ControlRequest(StrictModel):
    """`choice` null means every choice that has not ended. Other fields belong to one action each."""

    action: Action
    choice: int | None = None
    budget: int | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    keep_partial: bool | None = None
    at: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise ParameterError for a field of another action."""
        for name in ("budget", "text", "token_ids", "keep_partial", "at"):
            if name in self.model_fields_set and name not in _FIELDS.get(self.action, ()):
                raise ParameterError(name, f"has no meaning for {self.action}")


_FIELDS = {"set_budget": ("budget",), "inject": ("text", "token_ids"), "cancel": ("keep_partial",), "fork": ("at",)}


@router.post("/v1/thinkfold/responses/{response_id}/control", responses=statuses(404, 409))
async def control(
    request: Request, response_id: str, body: Annotated[ControlRequest, body_of(ControlRequest)]
) -> Controlled:
    """An order to a response that is being written."""
    state = state_of(request)
    engine = state.slot.require()
    body.check()
    controls = controllable(engine)
    labels = namespace_of(body.cache_salt, body.prompt_cache_key)
    controls.check_owner(response_id, owned(request, labels))
    done: Controlled = {"id": response_id, "object": "thinkfold.control", "action": body.action}
    return {**done, **await _ACTIONS[body.action](engine, controls, response_id, body)}


def controllable(engine: Engine) -> Controllable:
    """The engine's primitives of control. Raises UnsupportedError where it has none."""
    if not isinstance(engine, Controllable):
        raise UnsupportedError("action", "this engine cannot control a running response")
    return engine


async def _end_thinking(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    await controls.end_thinking(name, body.choice)
    return {}


async def _set_budget(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    """Null is no limit, as in a request."""
    if "budget" not in body.model_fields_set:
        raise ParameterError("budget", "is what set_budget sets; null or -1 is no limit")
    if body.choice is not None:
        raise ParameterError("choice", "a budget is one for all choices")
    return {"budget": await controls.set_budget(name, -1 if body.budget is None else body.budget)}


async def _inject(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    if (body.text is None) == (body.token_ids is None):
        raise ParameterError("text", "inject takes either text or token_ids")
    ids = engine.prompts.encode_more(body.text) if body.text is not None else body.token_ids or []
    return {"output_tokens": await controls.inject(name, ids, body.choice)}


async def _pause(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    await controls.pause(name, body.choice)
    return {}


async def _resume(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    await controls.resume(name, body.choice)
    return {}


async def _cancel(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    keep = body.keep_partial is not False
    await controls.cancel(name, body.choice, keep_partial=keep)
    return {"keep_partial": keep}


async def _fork(engine: Engine, controls: Controllable, name: str, body: ControlRequest) -> Effect:
    return {"handle": handle_data(await controls.fork(name, body.at, body.choice))}


def handle_data(handle: Handle) -> dict[str, Any]:
    """A handle as JSON."""
    return asdict(handle)


_ACTIONS: dict[str, Callable[[Engine, Controllable, str, ControlRequest], Awaitable[Effect]]] = {
    "end_thinking": _end_thinking,
    "set_budget": _set_budget,
    "inject": _inject,
    "pause": _pause,
    "resume": _resume,
    "fork": _fork,
    "cancel": _cancel,
}
