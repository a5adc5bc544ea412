"""How routes say what they take and what they answer, for the handlers and for the OpenAPI document alike."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from thinkfold.server.body import Model, read_body
from thinkfold.server.state import state_of

REMOTE_FAILED = 502
EVENTS, LAST = "events", "last"  # in what `replies` gives: the type of a stream's events, and the text that ends it


def body_of(model: type[Model]) -> Any:
    """For `body: Annotated[M, body_of(M)]`: the request's JSON as a checked `model`, once there is an engine to ask.

    Raises what `EngineSlot.require` and `read_body` raise.
    """

    async def read(request: Request) -> Model:
        state = state_of(request)
        state.slot.require()
        return await read_body(request, model, state.options.max_body_bytes)

    read.__annotations__["return"] = model  # the document shows the model that is read, not the one that is named
    return Depends(read)


def replies(whole: Any, events: Any, *also: int, last: str = "") -> dict[int | str, dict[str, Any]]:
    """For a route that answers with a Response of its own: its reply, a stream's events, and other statuses.

    Over a remote engine each may fail there.
    """
    return {200: {"model": whole, EVENTS: events, LAST: last}, **statuses(*also, REMOTE_FAILED)}


def statuses(*also: int) -> dict[int | str, dict[str, Any]]:
    """For a route that may fail in ways that others cannot."""
    return {status: {} for status in also}
