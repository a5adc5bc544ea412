"""Why a caller is turned away."""

from __future__ import annotations

from thinkfold.errors import ThinkfoldError


class AuthenticationError(ThinkfoldError):
    """No key, or a wrong one (HTTP 401)."""

    def __init__(self) -> None:
        super().__init__("a valid API key is needed (Authorization: Bearer …, or x-api-key)")


class ForbiddenError(ThinkfoldError):
    """The key is valid and may not do this (HTTP 403)."""


class RateLimitError(ThinkfoldError):
    """A key has used up one of its limits (HTTP 429); `retry_after` is in seconds."""

    def __init__(self, limit: str, value: int, retry_after: float) -> None:
        super().__init__(f"this key's limit {limit} ({value}) is used up, retry after {retry_after:.0f} s")
        self.limit = limit
        self.retry_after = retry_after


class HeadersTooLargeError(ThinkfoldError):
    """The request's headers are larger than the server accepts (HTTP 431)."""


class DrainingError(ThinkfoldError):
    """The server ends: what runs may finish, nothing new begins (HTTP 503)."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests")
