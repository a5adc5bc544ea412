"""Anthropic's error shape."""

from __future__ import annotations

from thinkfold.server.errors import Failure
from thinkfold.server.messages.shapes import MessagesError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_body(failure: Failure) -> MessagesError:
    """`{"type": "error", "error": …}`; the message begins with the field's name."""
    kind = _TYPES.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
