"""An app at a path of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class BelowPrefix:
    """An app that sees paths without the prefix at which Serve has put it: it knows its routes by whole paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            scope = {**scope, "root_path": "", "path": scope["path"].removeprefix(prefix) or "/"}
        await self._app(scope, receive, send)
