"""Reads server-sent events as servers of this kind write them: one line of JSON an event."""

from __future__ import annotations

from dataclasses import dataclass

DONE = b"[DONE]"


@dataclass(slots=True)
class DataLines:
    """Cuts a stream of bytes at `\\n` and `\\r\\n` only.

    A text inside JSON may hold other line ends of Unicode as they are, at which `str.splitlines` and httpx's
    `aiter_lines` cut, too.
    """

    _rest: bytes = b""

    def read(self, chunk: bytes) -> list[bytes]:
        """What stands behind `data:` in each line that `chunk` completes; comments and names of events do not."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        return [data for data in found if data]
