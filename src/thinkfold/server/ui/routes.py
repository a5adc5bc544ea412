"""Serves the page's own files, a fixed set, with a policy that lets them run no other code."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing from elsewhere, no inline code or styles, in no frame, and no form or link that leads data out.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_FILES = {
    "/" if path.name == "index.html" else f"/ui/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PATHS = tuple(_FILES)

router = APIRouter()


def _server_of(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        body = path.read_bytes()
        headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES[path.suffix], headers=headers)

    return serve


for _name, _path in _FILES.items():
    router.add_api_route(_name, _server_of(_path), methods=["GET", "HEAD"])
