"""OpenAI's error shape for everything that can go wrong. Knows errors, no requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from thinkfold.errors import (
    CapacityError,
    EngineDeadError,
    ParameterError,
    QueueFullError,
    RequestFailedError,
    ThinkfoldError,
    UnsupportedError,
)
from thinkfold.server.contract import EngineLoadingError

logger = logging.getLogger(__name__)

LOADING_RETRY_S = 5
CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody is left to read it


class ModelNotFoundError(ThinkfoldError):
    """The request names a model that is not served here (HTTP 404)."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r:.200} does not exist here; this server has {served!r}")


class BodyTooLargeError(ThinkfoldError):
    """The request body is larger than the server accepts (HTTP 413)."""


class ClientGoneError(Exception):
    """The client closed the connection before the reply was complete."""


# Error class -> status, type, code. The first match counts.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (CapacityError, 400, "invalid_request_error", "capacity_exceeded"),
    (UnsupportedError, 400, "invalid_request_error", "unsupported_value"),
    (ParameterError, 400, "invalid_request_error", "invalid_value"),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (RequestFailedError, 500, "server_error", "request_failed"),
    (EngineLoadingError, 503, "server_error", "engine_loading"),
    (EngineDeadError, 503, "server_error", "engine_dead"),
    (ThinkfoldError, 500, "server_error", None),
)


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and `{"error": …}` body of an error; unknown ones show no detail."""
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            param = error.field if isinstance(error, ParameterError) else None
            return status, _body(str(error), type_, param, code)
    return 500, _body("internal error", "server_error", None, "internal_error")


def _body(message: str, type_: str, param: str | None, code: str | None) -> dict[str, Any]:
    # A message may quote the user's text, in which a lone surrogate cannot be sent.
    clean = message.encode("utf-8", "replace").decode()
    param = param.encode("utf-8", "replace").decode() if param is not None else None
    return {"error": {"message": clean, "type": type_, "param": param, "code": code}}


def renamed(error: ParameterError, names: Mapping[str, str]) -> ParameterError:
    """The error with its field as the client wrote it; `names` has the first words of fields."""
    head, dot, rest = error.field.partition(".")
    return type(error)(f"{names[head]}{dot}{rest}", error.message) if head in names else error


def install(app: FastAPI) -> None:
    """Add the handlers to `app`."""
    app.add_exception_handler(ThinkfoldError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    status, body = describe(error)
    if status == 500:
        logger.error("request to %s failed", request.url.path, exc_info=error)
    request.app.state.thinkfold.metrics.errors.labels(str(status)).inc()
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, EngineLoadingError):
        headers["Retry-After"] = str(LOADING_RETRY_S)
    return JSONResponse(body, status, headers)


async def _on_client_gone(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(_body("client closed the request", "server_error", None, None), CLIENT_CLOSED_REQUEST)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    request.app.state.thinkfold.metrics.errors.labels(str(error.status_code)).inc()
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = _body(f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error", None, code)
    return JSONResponse(body, error.status_code, error.headers)
