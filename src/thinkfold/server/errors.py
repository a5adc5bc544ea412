"""Everything that can go wrong, as HTTP statuses and bodies: OpenAI's shape, or the one of the route's API."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from thinkfold.errors import (
    CapacityError,
    ConflictError,
    EngineDeadError,
    NotFoundError,
    ParameterError,
    PositionError,
    QueueFullError,
    RemoteError,
    ReplicaLostError,
    RequestFailedError,
    ThinkfoldError,
    UnsupportedError,
)
from thinkfold.server.access.errors import (
    AuthenticationError,
    DrainingError,
    ForbiddenError,
    HeadersTooLargeError,
    RateLimitError,
)
from thinkfold.server.contract import EngineLoadingError

logger = logging.getLogger(__name__)

LOADING_RETRY_S = 5
CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody is left to read it


class ModelNotFoundError(ThinkfoldError):
    """The request names a model that is not served here (HTTP 404)."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r:.200} does not exist here; this server has {served!r}")


class ResponseNotFoundError(ThinkfoldError):
    """No response of that id is stored for this tenant (HTTP 404)."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"no response {response_id!r:.100} is stored here")


class BodyTooLargeError(ThinkfoldError):
    """The request body is larger than the server accepts (HTTP 413)."""


class ClientGoneError(Exception):
    """The client closed the connection before the reply was complete."""


# Error class -> status, type, code. The first match counts.
KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (CapacityError, 400, "invalid_request_error", "capacity_exceeded"),
    (UnsupportedError, 400, "invalid_request_error", "unsupported_value"),
    (ParameterError, 400, "invalid_request_error", "invalid_value"),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (ResponseNotFoundError, 404, "invalid_request_error", "response_not_found"),
    (NotFoundError, 404, "invalid_request_error", "not_found"),
    (PositionError, 409, "invalid_request_error", "invalid_position"),
    (ConflictError, 409, "invalid_request_error", "conflict"),
    (AuthenticationError, 401, "authentication_error", "invalid_api_key"),
    (ForbiddenError, 403, "permission_error", "forbidden"),
    (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
    (RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (HeadersTooLargeError, 431, "invalid_request_error", "headers_too_large"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (RemoteError, 502, "server_error", "remote_failed"),
    (ReplicaLostError, 503, "server_error", "replica_lost"),
    (RequestFailedError, 500, "server_error", "request_failed"),
    (DrainingError, 503, "server_error", "server_draining"),
    (EngineLoadingError, 503, "server_error", "engine_loading"),
    (EngineDeadError, 503, "server_error", "engine_dead"),
    (ThinkfoldError, 500, "server_error", None),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as an API tells it. `type` and `code` are OpenAI's words, `param` names the field."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None


ErrorBody = Callable[[Failure], Mapping[str, Any]]


class ErrorFields(TypedDict):
    """`param` names the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """OpenAI's error. In a stream it is the last event before `[DONE]`."""

    error: ErrorFields


def failure_of(error: Exception) -> Failure:
    """What clients are told of an error; unknown ones show no detail."""
    for kind, status, type_, code in KINDS:
        if isinstance(error, kind):
            param = error.field if isinstance(error, ParameterError) else None
            return Failure(status, type_, _clean(str(error)), code, _clean(param) if param is not None else None)
    return Failure(500, "server_error", "internal error", "internal_error")


def openai_body(failure: Failure) -> ErrorReply:
    """`{"error": …}`."""
    error: ErrorFields = {
        "message": failure.message,
        "type": failure.type,
        "param": failure.param,
        "code": failure.code,
    }
    return {"error": error}


def _clean(text: str) -> str:
    """The text may quote the user's, in which a lone surrogate cannot be sent."""
    return text.encode("utf-8", "replace").decode()


def renamed(error: ParameterError, names: Mapping[str, str]) -> ParameterError:
    """The error with its field as the client wrote it; `names` has the first words of fields."""
    head, dot, rest = error.field.partition(".")
    return type(error)(f"{names[head]}{dot}{rest}", error.message) if head in names else error


def install(app: FastAPI, bodies: Mapping[str, ErrorBody]) -> None:
    """Add the handlers to `app`. `bodies` has the error shapes of routes by the beginning of their paths."""

    def answer(request: Request, failure: Failure, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse(_shape(bodies, request.url.path)(failure), failure.status, headers)

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        failure = failure_of(error)
        if failure.status == 500:
            logger.error("request to %s failed", request.url.path, exc_info=error)
        _count(app, failure.status, error)
        return answer(request, failure, _retry_after(error))

    async def on_client_gone(request: Request, error: Exception) -> JSONResponse:
        return answer(request, Failure(CLIENT_CLOSED_REQUEST, "server_error", "client closed the request"))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        request.app.state.thinkfold.metrics.errors.labels(str(error.status_code)).inc()
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return answer(request, Failure(error.status_code, "invalid_request_error", message, code), error.headers)

    app.add_exception_handler(ThinkfoldError, on_error)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_error)


def refusal(app: FastAPI, bodies: Mapping[str, ErrorBody]) -> Callable[[str, ThinkfoldError], JSONResponse]:
    """Writes and counts errors from before routing: `(path, error)` to a response."""

    def answer(path: str, error: ThinkfoldError) -> JSONResponse:
        failure = failure_of(error)
        _count(app, failure.status, error)
        headers = {"WWW-Authenticate": "Bearer"} if failure.status == 401 else _retry_after(error)
        return JSONResponse(_shape(bodies, path)(failure), failure.status, headers)

    return answer


def _count(app: FastAPI, status: int, error: Exception) -> None:
    metrics = app.state.thinkfold.metrics
    metrics.errors.labels(str(status)).inc()
    if isinstance(error, RateLimitError):
        metrics.limited.labels(error.limit).inc()


def _shape(bodies: Mapping[str, ErrorBody], path: str) -> ErrorBody:
    return next((made for prefix, made in bodies.items() if path.startswith(prefix)), openai_body)


def _retry_after(error: Exception) -> dict[str, str]:
    if isinstance(error, QueueFullError | RateLimitError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {"Retry-After": str(LOADING_RETRY_S)} if isinstance(error, EngineLoadingError) else {}
