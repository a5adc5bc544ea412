"""What may be asked of a running request over a remote server, done by cutting its stream. The rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinkfold.deploy.remote.choice import Choice
from thinkfold.deploy.remote.looks import look
from thinkfold.deploy.remote.request import Desk, RemoteRequest
from thinkfold.engine.commands import (
    Cancel,
    Drop,
    EndThinking,
    Extend,
    Forget,
    Fork,
    Hash,
    Inject,
    ListPins,
    Order,
    Pause,
    Prefill,
    Probe,
    Resume,
    Rollback,
    SetBudget,
    Unpin,
)
from thinkfold.engine.orders import changed_budget
from thinkfold.errors import ConflictError, NotFoundError, UnsupportedError
from thinkfold.types import ProbeResult

NEEDS_KV = "needs the engine's own KV, and the engine is a remote one"
_REFUSED: Mapping[type[Order], str] = {
    Pause: "pause",
    Resume: "resume",
    Fork: "fork",
    Rollback: "rollback",
    Hash: "state_hash",
    Extend: "handle",
    Prefill: "prefill",
}

Requests = Mapping[str, RemoteRequest]


async def carry_out(desk: Desk, requests: Requests, order: Order) -> Any:
    """The order's value. Raises UnsupportedError, NotFoundError, ConflictError, ParameterError."""
    if type(order) in _REFUSED:
        raise UnsupportedError(_REFUSED[type(order)], NEEDS_KV)
    match order:
        case ListPins():
            return []
        case Forget():
            return _forget(requests, order)
        case Unpin() | Drop():
            raise NotFoundError(f"there is no {order.request_id!r:.100}")
        case Cancel():
            running = _find(requests, order.request_id)
            return running.cancel(running.live(order.choice), keep=order.keep_partial)
        case EndThinking():
            return _end_thinking(_find(requests, order.request_id), order)
        case SetBudget():
            return await _set_budget(_find(requests, order.request_id), order)
        case Inject():
            choice = _one(_find(requests, order.request_id), order)
            async with choice.held():
                _check_alive(choice, order)
                return choice.inject(order.token_ids)
        case Probe():
            running = _find(requests, order.request_id)
            return await _probe(desk, running, order)
    raise UnsupportedError(type(order).__name__, NEEDS_KV)


def _find(requests: Requests, request_id: str) -> RemoteRequest:
    running = requests.get(request_id)
    if running is None or running.finished:
        raise NotFoundError(f"there is no running response {request_id!r:.100}")
    return running


def _forget(requests: Requests, order: Forget) -> dict[str, int]:
    """Only running requests are kept here: with a session those of it end."""
    calls = [
        each for each in requests.values() if not each.finished and each.request.is_of(order.labels, order.session)
    ]
    for each in calls if order.session else ():
        each.cancel(each.live(None))
    gone = {"handles": 0, "prefixes": 0, "pages": 0}
    return {"calls": len(calls), **gone} if order.session else gone


def _end_thinking(running: RemoteRequest, order: EndThinking) -> None:
    """It comes with the next token."""
    failures: list[ConflictError] = []
    choices = running.live(order.choice)
    for choice in choices:
        try:
            choice.control.end_thinking(order.reason)
        except ConflictError as error:
            failures.append(error)
    if len(failures) == len(choices):
        raise failures[0]


async def _set_budget(running: RemoteRequest, order: SetBudget) -> int | None:
    if order.choice is not None:
        raise ConflictError("a budget is one for all choices")
    request = changed_budget(running.request, order.budget)
    budget = request.thinking.budget
    for choice in running.live(None):
        if choice.budget is None:
            choice.control.set_budget(budget)
        else:  # the server counts: it has to be told
            async with choice.held():
                choice.budget = budget
    running.request = request
    return budget


async def _probe(desk: Desk, running: RemoteRequest, order: Probe) -> ProbeResult:
    result = await look(desk.line, running.request, _one(running, order), order)
    running.count_probe(result.computed_tokens)
    return result


def _one(running: RemoteRequest, order: Order) -> Choice:
    choices = running.live(order.choice)
    if len(choices) > 1:
        raise ConflictError(f"{order.request_id!r} has {len(choices)} running choices; name one")
    return choices[0]


def _check_alive(choice: Choice, order: Order) -> None:
    if choice.ended:
        raise NotFoundError(f"{order.request_id!r} has ended")
