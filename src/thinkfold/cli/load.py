"""A load of text completions over HTTP, and what it took: times at the client, tokens, memory that the server tells."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from thinkfold.cli.peers import Peer, gauge
from thinkfold.deploy.remote.events import DONE, DataLines
from thinkfold.errors import ThinkfoldError

WATCH_S = 0.25  # between two looks at the server's metrics
PATIENCE_S = 1800.0  # that a reply may take


class OutOfTime(ThinkfoldError):
    """A load that was given up; the server may still be at it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `known` tokens at its beginning were part of an earlier prompt of the same workload.

    `forced`: it runs to `max_tokens`, whatever the model would say. `judge` says whether its text is right.
    """

    prompt: str
    tokens: int
    max_tokens: int
    known: int = 0
    forced: bool = False
    judge: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one: seconds from sending to the first text and to the end; None for what was not told.

    Of an engine that does not stream the first text comes at the end.
    """

    ask: Ask
    seconds: float
    first_s: float
    text: str
    tokens: int
    cached: int | None


Session = Callable[[], AsyncGenerator[Ask, str]]  # asks one after the other; is sent the reply to each


@dataclass(frozen=True, slots=True)
class Run:
    """All replies of a workload, seconds for all, and the largest share of KV memory seen in use."""

    replies: list[Reply]
    seconds: float
    kv_use_peak: float | None


class Client:
    """Sends completions to one server; tokens are its usage, or else reckoned alike for every engine.

    A reply that was cut at its length has so many, another one as many as the model's own tokenizer makes of its text.
    """

    def __init__(self, url: str, peer: Peer, count: Callable[[str], int]) -> None:
        self._url, self._peer, self._count = url, peer, count
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)

    async def run(self, sessions: Sequence[Session], clients: int, limit: float = PATIENCE_S) -> Run:
        """So many sessions at a time, each asking as soon as its last reply is there, until all are through.

        Raises ThinkfoldError where a request fails: a rate over work that was not done says nothing; and OutOfTime
        after `limit` seconds.
        """
        replies: list[Reply] = []
        waiting = iter(sessions)
        seen: list[float] = []
        watching = asyncio.create_task(self._watch(seen))
        started = time.perf_counter()

        async def client() -> None:
            for session in waiting:
                await self._session(session(), replies)

        try:
            async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(client())
        except* (ThinkfoldError, httpx.HTTPError) as errors:
            raise ThinkfoldError(f"a request failed: {errors.exceptions[0]!r}") from errors
        except* TimeoutError as errors:
            raise OutOfTime(f"took longer than {limit:g} s") from errors
        finally:
            seconds = time.perf_counter() - started
            watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        return Run(replies, seconds, max(seen, default=None))

    async def close(self) -> None:
        await self._http.aclose()

    async def _session(self, asks: AsyncGenerator[Ask, str], replies: list[Reply]) -> None:
        async with aclosing(asks):
            ask = await anext(asks, None)
            while ask is not None:
                reply = await self.send(ask)
                replies.append(reply)
                try:
                    ask = await asks.asend(reply.text)
                except StopAsyncIteration:
                    return

    async def send(self, ask: Ask) -> Reply:
        """One completion. Raises ThinkfoldError for a refusal, an error in the stream, or unequal work."""
        body = {"model": self._peer.model_name, "prompt": ask.prompt, "max_tokens": ask.max_tokens, **self._peer.asks}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if self._peer.streams else {}
        body |= self._peer.forced if ask.forced else {}
        started, first, usage, cut, parts = time.perf_counter(), None, None, False, list[str]()
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ThinkfoldError(f"HTTP {answer.status_code}: {(await answer.aread())[:300]!r}")
            async for event in _events(answer) if self._peer.streams else _whole(answer):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    news = (choice.get("reasoning") or "") + (choice.get("text") or "")
                    if news and first is None and self._peer.streams:
                        first = time.perf_counter() - started
                    parts.append(news)
                    cut |= choice.get("finish_reason") == "length"
        seconds, text = time.perf_counter() - started, "".join(parts)
        tokens = usage["completion_tokens"] if usage else ask.max_tokens if cut else self._count(text)
        if ask.forced and tokens != ask.max_tokens:
            raise ThinkfoldError(f"made {tokens} tokens where {ask.max_tokens} were asked for")
        return Reply(ask, seconds, seconds if first is None else first, text, tokens, _cached(usage))

    async def _watch(self, seen: list[float]) -> None:
        """What the gauge says, for as long as the load runs."""
        while self._peer.kv_use is not None:
            with suppress(httpx.HTTPError):
                told = gauge((await self._http.get("/metrics")).text, self._peer.kv_use)
                seen += [] if told is None else [told]
            await asyncio.sleep(WATCH_S)


async def _whole(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """A reply that was not streamed, as one event."""
    yield json.loads(await answer.aread())


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    lines = DataLines()
    async for chunk in answer.aiter_bytes():
        for data in lines.read(chunk):
            if data == DONE:
                return
            event = json.loads(data)
            if event.get("error"):
                raise ThinkfoldError(f"the stream failed: {event['error']!r:.300}")
            yield event


def _cached(usage: dict[str, Any] | None) -> int | None:
    """Prompt tokens that were not computed, where the server tells."""
    details = (usage or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")
