"""Does the HTTP side keep up with many streams, and does it answer about its health while it refuses huge bodies?

The server of `thinkfold serve` runs in a process of its own, on a scripted engine: each stream makes its tokens by the
clock, and a token's text is the microsecond in which it was due, so that a client on the same machine knows how late it
is. News of all streams go out together every `--coalesce-ms`, as a core tells them; what a core's own messages cost is
not in here. The floor (`bare/…`) is an asyncio server that only writes the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import psutil
import uvicorn

from thinkfold.cli import rows
from thinkfold.cli.serve import freeze_loaded, listen
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import Health
from thinkfold.engine.language import load_language
from thinkfold.engine.messages import EngineStats, ModelInfo
from thinkfold.engine.stream import OutputStream
from thinkfold.errors import ThinkfoldError
from thinkfold.server.app import build_app
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    FinishReason,
    FoldParams,
    Phase,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingParams,
    ThinkingPolicy,
)

BODY_BYTES = 20_000_000
PROBE_S = 0.02  # a question about health every so often
BEHIND_S = 0.05  # a server falls behind whose lag grows by more than this from the first to the last quarter
SETTLE_S = 1.0
PATIENCE = 60.0
_TEXT = re.compile(rb'"reasoning":"([0-9 ]+)"')
_CHUNK = (
    b'data: {"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"scripted","choices":[{"index":0,"delta":{"reasoning":"%(text)b","reasoning_content":"%(text)b"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)


@dataclass(slots=True)
class Thinker:
    """One running stream. Token `i` is made at `began + i / rate`, in seconds of the monotonic clock."""

    name: str
    limit: float  # tokens
    began: float
    stream: OutputStream = field(default_factory=OutputStream)
    made: int = 0

    def tell(self, now: float, rate: float) -> None:
        """Put out what was made until `now`."""
        due = int(min(self.limit, (now - self.began) * rate + 1))
        if due == self.made:
            return
        text = "".join(f"{(self.began + i / rate) * 1e6:.0f} " for i in range(self.made, due))
        self.made = due
        news = CompletionOutput(0, reasoning=text, phase=Phase.THINKING, num_output_tokens=due, num_thinking_tokens=due)
        news.finish_reason = FinishReason.LENGTH if due == self.limit else None
        policy, costs = ThinkingPolicy(True, None, "default"), Costs(thinking_tokens=due)
        self.stream.put(RequestOutput(self.name, [news], policy, costs, finished=due == self.limit))


class ScriptedEngine:
    """What the server needs of an engine (`server.contract.Engine`); its tokenizer and template are Pebble's."""

    def __init__(self, rate: float, pause_s: float) -> None:
        self.config = EngineConfig(served_model_name="scripted")
        language = load_language(self.config)
        self.prompts = PromptRenderer(language.tokenizer, normalize=True, markers=language.markers)
        vocabulary = len(language.tokenizer)
        self.model = ModelInfo("scripted", "qwen3", 32768, vocabulary, 4096, 16, 1024, 65536, "qwen3", True, True)
        self._rate, self._pause_s = rate, pause_s
        self._running: dict[str, Thinker] = {}
        self._clock = asyncio.create_task(self._tell())

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        thinking: ThinkingParams,
        fold: FoldParams | None = None,
        *,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
        service: Service | None = None,
        control: ControlParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Thinks until `max_tokens`, one choice."""
        thinker = Thinker(request_id or "", sampling.max_tokens or math.inf, time.monotonic())
        self._running[thinker.name] = thinker
        try:
            while True:
                output = await thinker.stream.get()
                yield output
                if output.finished:
                    return
        finally:
            del self._running[thinker.name]

    def health(self) -> Health:
        return Health(alive=True, ready=True)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), pages_total=self.model.num_pages)

    async def stop(self) -> None:
        self._clock.cancel()

    async def _tell(self) -> None:
        turn = time.monotonic()
        while True:
            turn = max(turn + self._pause_s, time.monotonic())
            await asyncio.sleep(turn - time.monotonic())
            now = time.monotonic()
            for thinker in self._running.values():
                thinker.tell(now, self._rate)


async def serve(rate: float, pause_s: float, *, bare: bool) -> None:
    """Serve until killed; the port is printed once the server answers."""
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    if bare:
        engine = ScriptedEngine(rate, pause_s)
        freeze_loaded()
        server = await asyncio.start_server(partial(_write_only, engine), sock=sock)
        print(port, flush=True)
        await server.serve_forever()

    async def start() -> ScriptedEngine:
        return ScriptedEngine(rate, pause_s)

    app = build_app(start=start)
    http = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    task = asyncio.create_task(http.serve(sockets=[sock]))
    while not http.started:
        await asyncio.sleep(0.01)
    await app.state.thinkfold.slot.loaded()
    freeze_loaded()
    print(port, flush=True)
    await task


async def _write_only(engine: ScriptedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The same bytes without HTTP's checks, routes, policies and JSON."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    name = str(writer.get_extra_info("peername"))
    with suppress(ConnectionError):
        async for output in engine.generate([], SamplingParams(max_tokens=None), ThinkingParams(), request_id=name):
            data = _CHUNK % {b"text": output.outputs[0].reasoning.encode()}
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()


@contextmanager
def server_process(args: argparse.Namespace, *, bare: bool = False) -> Iterator[tuple[psutil.Process, int]]:
    """A server that answers, and its port. Raises ThinkfoldError."""
    words = [sys.executable, __file__, "--serve", "bare" if bare else "http"]
    words += ["--rate", str(args.rate), "--coalesce-ms", str(args.coalesce_ms)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise ThinkfoldError(f"the server has ended with exit code {server.wait()}")
            yield psutil.Process(server.pid), int(line)
        finally:
            server.kill()


def request_of(body: dict[str, object]) -> bytes:
    """A chat request with that body, as it goes over the wire."""
    raw = json.dumps({"model": "scripted", **body}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)


@dataclass(slots=True)
class Arrivals:
    """When tokens came, and how long after they were due (seconds)."""

    at: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))
    events: int = 0
    open: int = 0

    def take(self, event: bytes, now: float) -> None:
        """One server-sent event."""
        found = _TEXT.search(event)
        if found is None:
            return
        self.events += 1
        for made in found[1].split():
            self.at.append(now)
            self.lag.append(now - int(made) / 1e6)

    def metrics(self, began: float, seconds: float) -> dict[str, float]:
        """Of the tokens that came in that time."""
        came = [(at, lag) for at, lag in zip(self.at, self.lag, strict=True) if began <= at < began + seconds]
        lags = sorted(lag for _, lag in came)
        first = sorted(lag for at, lag in came if at < began + seconds / 4)
        last = sorted(lag for at, lag in came if at >= began + seconds * 3 / 4)
        if not first or not last:
            raise ThinkfoldError("no token came in a quarter of the time")
        growth = share(last, 0.5) - share(first, 0.5)
        return {
            "tokens_per_s": len(came) / seconds,
            "lag_p50_s": share(lags, 0.5),
            "lag_p99_s": share(lags, 0.99),
            "lag_max_s": lags[-1],
            "lag_growth_s": growth,
            "falls_behind": int(growth > BEHIND_S),
        }


def share(ordered: Sequence[float], part: float) -> float:
    """The value below which that part of the values lies."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def _read(port: int, limit: int, arrivals: Arrivals) -> None:
    """One stream until its end. Raises ThinkfoldError unless it was accepted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": limit}
        writer.write(request_of(body))
        event = await reader.readuntil(b"\n\n")
        if not event.startswith(b"HTTP/1.1 200"):
            raise ThinkfoldError(f"a stream was refused: {event[:200]!r}")
        arrivals.open += 1
        while not event.endswith(b"[DONE]\n\n"):
            arrivals.take(event, time.monotonic())
            event = await reader.readuntil(b"\n\n")
    finally:
        writer.close()


async def stream_case(port: int, server: psutil.Process, args: argparse.Namespace) -> dict[str, float]:
    """All streams side by side for `args.seconds`, after they have been accepted. Raises ThinkfoldError."""
    arrivals, limit = Arrivals(), math.ceil(args.rate * (args.seconds + PATIENCE))
    tasks = [asyncio.create_task(_read(port, limit, arrivals)) for _ in range(args.streams)]
    try:
        for _ in range(int(PATIENCE / 0.05)):
            await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            if arrivals.open == args.streams or any(task.done() for task in tasks):
                break
        await asyncio.sleep(SETTLE_S)
        began, events, cpu = time.monotonic(), arrivals.events, (_cpu(server), _cpu(psutil.Process()))
        done, _ = await asyncio.wait(tasks, timeout=args.seconds, return_when=asyncio.FIRST_COMPLETED)
        took = time.monotonic() - began
        used = _cpu(server) - cpu[0], _cpu(psutil.Process()) - cpu[1]
        for task in done:
            raise task.exception() or ThinkfoldError("a stream has ended too early")
        if arrivals.open < args.streams:
            raise ThinkfoldError(f"only {arrivals.open} of {args.streams} streams were accepted")
        told = (arrivals.events - events) / took
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = {"offered_per_s": args.streams * args.rate, **arrivals.metrics(began, took)}
    return {**found, "events_per_s": told, "server_cpu": used[0] / took, "client_cpu": used[1] / took}


async def health_case(port: int, server: psutil.Process, args: argparse.Namespace) -> dict[str, float]:
    """Questions about health, each by the clock, while clients post bodies that are refused. Raises ThinkfoldError."""
    raw = request_of({"messages": [{"role": "user", "content": "x" * BODY_BYTES}]})
    over, statuses, probes = threading.Event(), list[bytes](), list[asyncio.Task[float]]()
    posters = [threading.Thread(target=_keep_posting, args=(port, raw, over, statuses)) for _ in range(args.posters)]
    for poster in posters:
        poster.start()
    try:
        await asyncio.sleep(SETTLE_S)
        began, cpu, refused = time.monotonic(), _cpu(server), len(statuses)
        while (due := began + len(probes) * PROBE_S) < began + args.seconds:
            await asyncio.sleep(due - time.monotonic())
            probes.append(asyncio.create_task(_probe(port, due)))
        waits = sorted(await asyncio.gather(*probes))
        took, used, refused = time.monotonic() - began, _cpu(server) - cpu, len(statuses) - refused
    finally:
        over.set()
        for poster in posters:
            await asyncio.to_thread(poster.join)
    if set(statuses) != {b"400"} or not refused:
        raise ThinkfoldError(f"bodies were to be refused with 400, there were {sorted(set(statuses))}")
    found = {"health_p50_s": share(waits, 0.5), "health_p99_s": share(waits, 0.99), "health_max_s": waits[-1]}
    return {"refused_per_s": refused / took, **found, "server_cpu": used / took}


def _keep_posting(port: int, raw: bytes, over: threading.Event, statuses: list[bytes]) -> None:
    while not over.is_set():
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
            sock.sendall(raw)
            statuses.append(sock.recv(12)[-3:])


async def _probe(port: int, due: float) -> float:
    """Seconds from `due` until `/health` has answered on a connection of its own. Raises ThinkfoldError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        reply = await reader.read()
    finally:
        writer.close()
    if not reply.startswith(b"HTTP/1.1 200"):
        raise ThinkfoldError(f"/health says {reply[:80]!r}")
    return time.monotonic() - due


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def cases(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    """What can be measured, by name."""

    def streams(bare: bool) -> dict[str, float]:
        with server_process(args, bare=bare) as (server, port):
            return asyncio.run(stream_case(port, server, args))

    def health() -> dict[str, float]:
        with server_process(args) as (server, port):
            return asyncio.run(health_case(port, server, args))

    size = f"{args.streams}x{args.rate:g}"
    return {f"streams/{size}": lambda: streams(False), f"bare/{size}": lambda: streams(True), "health/20mb": health}


def report(bench: str, asked: Mapping[str, Callable[[], Mapping[str, float]]], args: argparse.Namespace) -> None:
    """Measure each case, print its row and keep it as `args` say, with the machine's load before."""
    for name, measure in asked.items():
        load = os.getloadavg()[0]
        row = rows.make_row(bench, name, {**measure(), "load_before": load})
        if not args.no_record:
            rows.keep(row)
        print(json.dumps(row) if args.json else f"{name}: {json.dumps(row['metrics'])}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", choices=("streams", "bare", "health"), help="default: all")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--coalesce-ms", type=float, default=40.0, help="tokens of this long travel together")
    parser.add_argument("--posters", type=int, default=4, help="clients that post 20 MB bodies")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    parser.add_argument("--serve", choices=("http", "bare"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("streams", "rate", "coalesce_ms", "posters", "seconds"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be above 0")
    if args.serve:
        asyncio.run(serve(args.rate, args.coalesce_ms / 1e3, bare=args.serve == "bare"))
        return 0
    gc.freeze()
    asked = {name: case for name, case in cases(args).items() if not args.case or name.partition("/")[0] in args.case}
    report("overhead", asked, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
