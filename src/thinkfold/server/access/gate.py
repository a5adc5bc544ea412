"""The gate in front of every route: deny by default. Knows paths and headers, no bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from thinkfold.errors import ThinkfoldError
from thinkfold.server.access.errors import AuthenticationError, DrainingError, ForbiddenError, HeadersTooLargeError
from thinkfold.server.access.keys import ApiKey, KeyTable
from thinkfold.server.access.quotas import Lease, Quotas

ADMIN = "/admin"
OPEN_ROUTES = ("/health", "/ready")


@dataclass(slots=True)
class Access:
    """Who may call. Without `keys` everybody may, except for admin routes."""

    keys: KeyTable | None = None
    open_routes: tuple[str, ...] = OPEN_ROUTES
    max_header_bytes: int = 32 * 1024
    quotas: Quotas = field(default_factory=Quotas)
    draining: bool = False
    running: Counter[str] = field(default_factory=Counter)  # generations by tenant

    def lease(self, request: Request, thinking: int) -> Lease:
        """The begin of a generation of `request`. Raises RateLimitError."""
        key: ApiKey | None = getattr(request.state, "api_key", None)
        lease = Lease(None, 0) if key is None else self.quotas.lease(key, thinking)
        lease.count(self.running, getattr(request.state, "tenant", ""))
        return lease


class Gate:
    """ASGI middleware. `answer(path, error)` writes a refusal in the shape of the path's API.

    `public` are paths of files that hold nothing of anybody: a browser gets them without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        answer: Callable[[str, ThinkfoldError], Response],
        public: Collection[str] = (),
    ) -> None:
        self._app = app
        self._public = frozenset(public)
        self._access = access
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # no route takes one
            return
        if scope["type"] == "http":
            try:
                self._admit(scope)
            except ThinkfoldError as error:
                await self._answer(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        access, path = self._access, scope["path"]
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > access.max_header_bytes:
            raise HeadersTooLargeError(f"the headers are larger than {access.max_header_bytes} bytes")
        if scope["method"] in ("GET", "HEAD") and (path in self._public or path in access.open_routes):
            return
        is_admin = f"{path}/".startswith(f"{ADMIN}/")
        if access.keys is not None:
            key = _key(access.keys, scope)
            if is_admin and not key.admin:
                raise ForbiddenError("this key is none of an administrator")
            access.quotas.count_request(key)
            scope["state"] = {**scope.get("state", {}), "api_key": key, "tenant": key.owner}
        elif is_admin:
            raise ForbiddenError("admin routes need API keys, and this server has none")
        if access.draining and scope["method"] == "POST" and not is_admin:
            raise DrainingError


def _key(keys: KeyTable, scope: Scope) -> ApiKey:
    given: Mapping[bytes, list[bytes]] = {
        name: [value for header, value in scope["headers"] if header == name]
        for name in (b"authorization", b"x-api-key")
    }
    values = given[b"authorization"] or given[b"x-api-key"]
    if len(values) != 1:
        raise AuthenticationError
    secret = values[0].decode("latin-1").strip()
    if given[b"authorization"]:
        scheme, _, secret = secret.partition(" ")
        if scheme.lower() != "bearer":
            raise AuthenticationError
    key = keys.find(secret.strip())
    if key is None:
        raise AuthenticationError
    return key
