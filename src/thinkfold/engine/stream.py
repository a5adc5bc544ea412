"""Between the core and its readers: a slow reader gets merged deltas, never a backlog."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from thinkfold.errors import ParameterError
from thinkfold.types import Handle, RequestOutput


class OutputStream:
    """Holds at most one pending output; later ones are merged into it."""

    def __init__(self) -> None:
        self.pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self.pending is None:
            self.pending = output
        else:
            self.pending.merge(output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """The next `get` after the pending output raises `error`."""
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        """Everything new since the last call; waits until there is some."""
        await self._news.wait()
        output, self.pending = self.pending, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        return output


@dataclass(slots=True)
class _Reader:
    choices: int
    namespace: tuple[str, ...]
    stream: OutputStream | None  # None: nobody listens any more


class Readers:
    """Who reads the requests whose end the core has not told. `let_go` gets handles that nobody will hear of."""

    def __init__(self, let_go: Callable[[Handle], None]) -> None:
        self._let_go = let_go
        self._readers: dict[str, _Reader] = {}

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def choices(self) -> int:
        """Choices of all requests."""
        return sum(reader.choices for reader in self._readers.values())

    def add(self, name: str, choices: int, namespace: tuple[str, ...]) -> OutputStream:
        """A request is about to start. Raises ParameterError for a name that runs."""
        if name in self._readers:
            raise ParameterError("request_id", f"{name!r} is running already")
        stream = OutputStream()
        self._readers[name] = _Reader(choices, namespace, stream)
        return stream

    def namespace(self, name: str) -> tuple[str, ...] | None:
        """Of a request that somebody listens to."""
        reader = self._readers.get(name)
        return None if reader is None or reader.stream is None else reader.namespace

    def leave(self, name: str, stream: OutputStream) -> bool:
        """Nobody listens to the request any more; whether its end is still to be told."""
        self._drop(stream.pending)
        reader = self._readers.get(name)
        if reader is None or reader.stream is not stream:  # the name may belong to a later request
            return False
        reader.stream = None
        return True

    def forget(self, name: str) -> None:
        """Its end will not be told."""
        self._readers.pop(name, None)

    def deliver(self, output: RequestOutput) -> None:
        """News of a request."""
        reader = self._readers.get(output.request_id)
        if output.finished:
            self.forget(output.request_id)
        if reader is not None and reader.stream is not None:
            reader.stream.put(output)
        else:
            self._drop(output)

    def fail(self, error: Exception) -> None:
        """No request gets an end any more."""
        for reader in self._readers.values():
            if reader.stream is not None:
                reader.stream.fail(error)
        self._readers.clear()

    def _drop(self, output: RequestOutput | None) -> None:
        for news in output.outputs if output is not None else ():
            if news.handle is not None:
                self._let_go(news.handle)
