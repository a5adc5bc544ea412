"""What the client sends and what comes back, without sending it: one call is a method, a path and a body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from thinkfold.errors import ParameterError
from thinkfold.types import Decision, Handle, SessionParams, SessionState, Until
from thinkfold.types.verdict import check_name

NO_KEY = "unused"  # servers without keys ask for none


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call, relative to the base URL. It is never repeated: an order is not idempotent."""

    method: Literal["post", "get", "delete"]
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Owner:
    """The labels of the request that a response or handle belongs to; anybody else gets 404."""

    cache_salt: str | None = None
    prompt_cache_key: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a response. `phase` is that of the next token, `output_tokens` count from the response's start.

    `finish_reason` is `boundary` where the part ends and the response does not.
    """

    reasoning: str
    text: str
    phase: str
    output_tokens: int
    finish_reason: str
    stop_reason: str | int | None
    thinking_end_reason: str | None


def response_id(response: Any) -> str:
    """The id of a response: itself, or that of a reply, chunk or event that tells it. Raises ParameterError."""
    for holder in (response, getattr(response, "response", None), getattr(response, "message", None)):
        found = holder if isinstance(holder, str) else getattr(holder, "id", None)
        if isinstance(found, str) and found:
            return found
    raise ParameterError("response", f"must be an id, or a reply, chunk or event that tells one, got {response!r:.60}")


def order(name: str, owner: Owner, action: str, **more: Any) -> Call:
    """An order to a running response; what is None is left out."""
    given = {key: value for key, value in more.items() if value is not None}
    return Call(
        "post", f"/thinkfold/responses/{quote(name, safe='')}/control", {"action": action, **given, **owner.labels}
    )


def begin(owner: Owner, until: Until | None, fields: Mapping[str, Any]) -> Call:
    """A first part. Raises ParameterError for fields that are the client's own to set."""
    taken = next((name for name in ("handle", "until", *owner.labels) if name in fields), None)
    if taken is not None:
        raise ParameterError(taken, "is an argument of its own")
    return Call("post", "/thinkfold/partial", {**fields, **_until(until), **owner.labels})


def extend(
    owner: Owner, handle: Handle, until: Until | None, n: int, temperature: float | None, seed: int | None
) -> Call:
    """The next parts behind a handle."""
    draws = {name: value for name, value in (("temperature", temperature), ("seed", seed)) if value is not None}
    return Call("post", "/thinkfold/partial", {"handle": handle.id, "n": n, **draws, **_until(until), **owner.labels})


def release(owner: Owner, handle: Handle) -> Call:
    """Forget a handle."""
    return Call("delete", f"/thinkfold/partial/{quote(handle.id, safe='')}", params=owner.labels)


def session(action: Literal["get", "delete"], name: str) -> Call:
    """Look at a session, or forget it."""
    return Call(action, f"/thinkfold/sessions/{quote(name, safe='')}")


def with_session(params: SessionParams, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """A body's fields with the session in them. Raises ParameterError where there is one already."""
    ours = dict((extra or {}).get("thinkfold") or {})
    if "session" in ours:
        raise ParameterError("extra_body.thinkfold.session", "is this session's to set")
    return {**(extra or {}), "thinkfold": {**ours, "session": asdict(params)}}


def with_decision(how: Decision, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """A body's fields with a vote, best of N or a search in them. Raises ParameterError."""
    if how.field in (extra or {}):
        raise ParameterError(f"extra_body.{how.field}", "is an argument of its own")
    verifier = getattr(how, "verifier", None)
    if verifier is not None:
        check_name(f"{how.field}.verifier", verifier)
    given = {name: value for name, value in asdict(how).items() if value is not None}
    return {**(extra or {}), how.field: given}


def handle_of(data: Mapping[str, Any]) -> Handle:
    return Handle(**data)


def written_of(choice: Mapping[str, Any]) -> Written:
    return Written(**{name: choice[name] for name in Written.__dataclass_fields__})


def session_of(data: Mapping[str, Any]) -> SessionState:
    return SessionState(**{name: data[name] for name in SessionState.__dataclass_fields__})


def _until(until: Until | None) -> dict[str, Any]:
    return {} if until is None else {"until": asdict(until)}
