"""Finished responses, kept for a while so that a later one may go on from them. Plain Python, one thread."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinkfold.server.responses.shapes import ResponseBody

_OVERHEAD = 2048  # of one response beside its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` as clients see it; `messages` is the conversation, this response's own included; `session` "" is none."""

    body: ResponseBody
    messages: list[dict[str, Any]]
    session: str = ""


class ResponseStore:
    """Holds at most `max_bytes`, each response for `ttl_s` seconds since it was last used.

    Keys are (tenant, id): nobody sees another tenant's. The least recently used goes first.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        self._used = 0
        self._entries: OrderedDict[tuple[str, str], tuple[StoredResponse, int, float]] = OrderedDict()

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Keep a response; False if it alone is larger than the store."""
        size = _OVERHEAD + _bytes_of([response.body, response.messages])
        self.delete(tenant, response_id)
        if size > self.max_bytes:
            return False
        self._entries[tenant, response_id] = (response, size, self._clock() + self.ttl_s)
        self._used += size
        self._evict()
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._evict()
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return None
        response, size, _ = entry
        self._entries[tenant, response_id] = (response, size, self._clock() + self.ttl_s)
        return response

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one to forget."""
        self._evict()
        entry = self._entries.pop((tenant, response_id), None)
        self._used -= entry[1] if entry else 0
        return entry is not None

    def delete_tenant(self, tenant: str) -> int:
        """Forget all of a tenant's; their number."""
        mine = [key for key in self._entries if key[0] == tenant]
        return sum(self.delete(*key) for key in mine)

    def delete_session(self, tenant: str, session: str) -> int:
        """Forget the responses of a session's calls; their number."""
        mine = [key for key, (kept, _, _) in self._entries.items() if (key[0], kept.session) == (tenant, session)]
        return sum(self.delete(*key) for key in mine)

    def check_integrity(self) -> None:
        """Raise AssertionError if sizes or the order of ends are wrong."""
        ends = [end for _, _, end in self._entries.values()]
        assert ends == sorted(ends)
        assert self._used == sum(size for _, size, _ in self._entries.values()) <= self.max_bytes

    def _evict(self) -> None:
        """Drop what is too old, and the oldest while there is too much. All ends are in order."""
        now = self._clock()
        while self._entries:
            key, (_, size, end) = next(iter(self._entries.items()))
            if end > now and self._used <= self.max_bytes:
                return
            del self._entries[key]
            self._used -= size


def _bytes_of(value: Any) -> int:
    """Memory of the texts in JSON-like values."""
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            total += sys.getsizeof(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return total
