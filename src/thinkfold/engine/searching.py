"""Runs a search over live thinking: the rules walk, the engine writes, and the tree is told as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from thinkfold.control.equality import Equality
from thinkfold.control.search import Search
from thinkfold.control.verifier import Verifier
from thinkfold.engine.thoughts import Thoughts
from thinkfold.types import RequestOutput, SearchParams


class Room:
    """Handles for the states of searches: one that needs more than are left waits for its turn."""

    def __init__(self, size: int) -> None:
        self.size = self._left = size
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Hold so many, at most `size`; first come, first served."""
        async with self._turn:
            while self._left < count:
                self._freed.clear()
                await self._freed.wait()
            self._left -= count
        try:
            yield
        finally:
            self._left += count
            self._freed.set()


async def run_search(
    thoughts: Thoughts, params: SearchParams, verifier: Verifier | None, equality: Equality, room: Room
) -> AsyncGenerator[RequestOutput, None]:
    """Yield where it stands after each round, at last with the reply. `thoughts` are closed."""
    news = asyncio.Event()
    name = None if verifier is None else verifier.name
    search = Search(params, thoughts, equality, verifier=name, changed=news.set)
    async with room.places(params.most_held):
        walk = asyncio.create_task(search.run())
        walk.add_done_callback(lambda _: news.set())
        try:
            while True:
                await news.wait()
                news.clear()
                if walk.done():
                    break
                yield thoughts.output(search.state())
            result = walk.result()
            yield thoughts.output(search.state(), result.key)
        finally:
            walk.cancel()
            await asyncio.gather(walk, return_exceptions=True)
            await asyncio.shield(asyncio.create_task(thoughts.close()))
