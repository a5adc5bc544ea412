"""The buffer between the core and one reader: a slow reader gets merged deltas, never a backlog."""

from __future__ import annotations

import asyncio

from thinkfold.types import RequestOutput


class OutputStream:
    """Holds at most one pending output; later ones are merged into it."""

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._pending is None:
            self._pending = output
        else:
            self._pending.merge(output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """The next `get` after the pending output raises `error`."""
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        """Everything new since the last call; waits until there is some."""
        await self._news.wait()
        output, self._pending = self._pending, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        return output
