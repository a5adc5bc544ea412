"""Serves the page's own files, a fixed set, with a policy that lets them run no other code."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

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
_FILES = {path.name: path for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
_PAGE = "index.html"
PATHS = ("/", *(f"/ui/{name}" for name in _FILES if name != _PAGE))
ROUTES = ("/", "/ui/{name}")

router = APIRouter()


def _kinds(*suffixes: str) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of files."""
    kinds = {_TYPES[suffix]: {"schema": {"type": "string"}} for suffix in suffixes}
    return {200: {"content": kinds}, 304: {}}


@router.get("/", responses=_kinds(".html"))
async def page(request: Request) -> Response:
    """The page: playground and engine view."""
    return _file(request, _PAGE)


@router.get("/ui/{name}", responses={**_kinds(".css", ".js", ".svg"), 404: {}})
async def file(request: Request, name: str) -> Response:
    """A file of the page."""
    if name not in _FILES or name == _PAGE:
        raise HTTPException(404)
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    path = _FILES[name]
    body = path.read_bytes()
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_TYPES[path.suffix], headers=headers)
