"""Server-sent events: one JSON object an event, comments while nothing happens, `[DONE]` last."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

DONE = "[DONE]"
KEEP_ALIVE = b": keep-alive\n\n"
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # of Unicode; JSON escapes those of ASCII


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One event, named if it is not an ordinary chunk. Its text may not hold lone surrogates, NaN or infinities.

    It is one line for every reader: many (httpx's `iter_lines`) also cut at line ends that the standard does not know.
    """
    head = f"event: {name}\ndata: " if name else "data: "
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return f"{head}{text}\n\n".encode()


class EventStream(Response):
    """Sends what `events` yields, at the client's pace. Awaits `close` however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client is gone, which is no error of ours
        finally:
            await self._events.aclose()
            await self._close()
