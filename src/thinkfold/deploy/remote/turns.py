"""Whose turn it is: as many choices at once as the server takes, between tiers by their weights."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from thinkfold.types import Tier


class Turns:
    """`most` choices draw at once. Of those that wait, the tier with the fewest tokens over its weight is next.

    A tier that comes back from idling starts level with those that worked meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, float] = {}
        self.running: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, tier: Tier) -> AsyncIterator[None]:
        """Wait for a place and keep it."""
        await self._enter(tier.name)
        try:
            yield
        finally:
            self._leave(tier.name)

    def charge(self, tier: Tier, tokens: int) -> None:
        """The tier has drawn `tokens`."""
        self._served[tier.name] = self._served.get(tier.name, 0.0) + tokens / tier.weight

    async def _enter(self, name: str) -> None:
        if not self.running.get(name) and not self._waiting.get(name):
            busy = [self._served.get(other, 0.0) for other in self._busy()]
            self._served[name] = max(self._served.get(name, 0.0), min(busy, default=0.0))
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(place)
        self._next()
        try:
            await place
        except asyncio.CancelledError:
            if place in self._waiting[name]:
                self._waiting[name].remove(place)
            elif not place.cancelled():  # the turn came in the same moment
                self._leave(name)
            raise

    def _leave(self, name: str) -> None:
        self.running[name] -= 1
        self._free += 1
        self._next()

    def _busy(self) -> set[str]:
        return {n for n, count in self.running.items() if count} | {n for n, line in self._waiting.items() if line}

    def _next(self) -> None:
        while self._free and self.waiting:
            name = min((n for n, line in self._waiting.items() if line), key=lambda n: self._served.get(n, 0.0))
            place = self._waiting[name].popleft()
            if not place.cancelled():
                place.set_result(None)
                self.running[name] = self.running.get(name, 0) + 1
                self._free -= 1
