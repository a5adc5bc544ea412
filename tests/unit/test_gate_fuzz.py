"""Whatever headers, methods and paths come: one right key and open routes come through the gate, nothing else does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Response
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server_access import ADMIN, RIGHT, TABLE, WRONG

from thinkfold.server.access.errors import AuthenticationError, ForbiddenError
from thinkfold.server.access.gate import OPEN_ROUTES, Access, Gate
from thinkfold.server.streaming import event

STATUS = {AuthenticationError: 401, ForbiddenError: 403}
Headers = list[tuple[bytes, bytes]]

SECRETS = st.sampled_from([RIGHT, ADMIN, WRONG, "", RIGHT[:-1], f"{RIGHT}x", RIGHT.upper()]) | st.text(max_size=20)
SCHEMES = st.sampled_from(["Bearer ", "bearer ", "BEARER ", "Basic ", "Bearer", "", "Bearer\t", " Bearer "])
VALUES = st.builds(lambda scheme, secret: f"{scheme}{secret}".encode(), SCHEMES, SECRETS) | st.binary(max_size=40)
NAMES = st.sampled_from([b"authorization", b"x-api-key", b"cookie", b"x-forwarded-for", b"authorisation"])
PATHS = st.sampled_from(
    ["/v1/models", "/admin", "/admin/keys", "/admin/", "/administer", "/health", "/health/", "//health", "/Health", "/"]
) | st.text(max_size=12).map(lambda text: f"/{text}")


def secret_of(headers: Headers) -> str | None:
    """What the headers give as a key, by the letter of the page: one header, and Authorization before x-api-key."""
    for name, scheme in ((b"authorization", "bearer "), (b"x-api-key", "")):
        values = [value.decode("latin-1").strip() for header, value in headers if header == name]
        if values:
            right = len(values) == 1 and values[0][: len(scheme)].lower() == scheme
            return values[0][len(scheme) :].strip() if right else None
    return None


def asked(method: str, path: str, headers: Headers) -> int:
    """The status of a request; 200 if it came through."""
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(200)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    gate = Gate(app, access=Access(TABLE), answer=lambda path, error: Response(status_code=STATUS[type(error)]))
    asyncio.run(gate({"type": "http", "method": method, "path": path, "headers": headers}, receive, send))
    (status,) = seen
    return status


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["GET", "HEAD", "POST", "DELETE", "OPTIONS", "BREW"]),
    PATHS,
    st.lists(st.tuples(NAMES, VALUES), max_size=3),
)
def test_only_a_right_key_comes_through(method: str, path: str, headers: Headers) -> None:
    secret = secret_of(headers)
    if method in ("GET", "HEAD") and path in OPEN_ROUTES:
        expected = 200
    elif secret not in (RIGHT, ADMIN):
        expected = 401
    else:
        expected = 403 if secret == RIGHT and f"{path}/".startswith("/admin/") else 200
    assert asked(method, path, headers) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([None, "thinkfold.fold"]))
def test_an_event_is_one_line_of_json_whatever_its_text(text: str, name: str | None) -> None:
    raw = event({"text": text}, name) if name else event({"text": text})
    *lines, end, last = raw.decode().split("\n")
    assert end == last == "" and len(lines) == (2 if name else 1) and not {"\r", "\0"} & set(raw.decode())
    assert lines[0] == f"event: {name}" or not name
    assert json.loads(lines[-1].removeprefix("data: ")) == {"text": text}
    assert raw.decode().splitlines() == [*lines, ""], "nor is it cut by readers that know more line ends"
