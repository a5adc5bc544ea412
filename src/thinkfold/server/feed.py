"""Outputs of one or more engine requests of one HTTP request, and the client's going away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import Request

from thinkfold.errors import RequestFailedError
from thinkfold.server.errors import ClientGoneError
from thinkfold.types import RequestOutput


class Feed:
    """Reads engine iterators side by side, one output of each in flight.

    `close` must always be awaited: it ends the requests that are still running.
    """

    def __init__(self, request: Request, iterators: Sequence[AsyncIterator[RequestOutput]]) -> None:
        self._iterators = list(iterators)
        self._tasks = {asyncio.create_task(_following(it)): i for i, it in enumerate(self._iterators)}
        self._gone = asyncio.create_task(_client_gone(request))

    async def next(self, timeout: float | None = None) -> tuple[int, RequestOutput] | None:
        """The next output with its iterator's index; None after `timeout` seconds without one.

        Raises what the engine raised, and ClientGoneError. Not to be called after the last
        finished output.
        """
        while self._tasks:
            waiting = {*self._tasks, self._gone}
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._gone in done:
                raise ClientGoneError
            if not done:
                return None
            task = min(done, key=lambda t: self._tasks[t])
            index = self._tasks.pop(task)
            output = task.result()
            if output is not None:
                if not output.finished:
                    self._tasks[asyncio.create_task(_following(self._iterators[index]))] = index
                return index, output
        raise RequestFailedError("the engine sent no final message")

    async def close(self) -> list[RequestOutput]:
        """Close all iterators, which aborts what is not finished; returns outputs that nobody has taken."""
        tasks = [*self._tasks, self._gone]
        for task in tasks:
            task.cancel()
        left = await asyncio.gather(*tasks, return_exceptions=True)
        for iterator in self._iterators:
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                with contextlib.suppress(Exception):  # an error of the request itself was already reported
                    await aclose()
        return [output for output in left if isinstance(output, RequestOutput)]


async def _following(iterator: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    return await anext(iterator, None)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
