"""`thinkfold ask`: one question, thinking dimmed, then the answer, then one line of costs."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, RequestFailedError, ThinkfoldError
from thinkfold.types import EFFORT_BUDGETS, SamplingParams, ThinkingParams

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the reply; the last one carries the costs and how thinking ended."""

    reasoning: str = ""
    text: str = ""
    costs: dict[str, Any] | None = None
    thinking_end: str | None = None


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("ask", help="ask one question and watch the model think", allow_abbrev=False)
    parser.add_argument("question", help="the question, or - to read it from standard input")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000 (default: run the model here)")
    parser.add_argument("--model", help="a folder, a hub id or pebble; with --url, the served name")
    parser.add_argument("--depth", choices=list(EFFORT_BUDGETS), help="how long it may think (default: medium)")
    parser.add_argument("--no-thinking", action="store_true", help="answer at once")
    parser.add_argument("--max-tokens", type=int, help="tokens of the reply (default: up to the model's length)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, help="repeat a sampled reply")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the reply. Raises ThinkfoldError."""
    if args.no_thinking and args.depth not in (None, "none"):
        raise ParameterError("depth", "disagrees with --no-thinking")
    if args.question == "-" and sys.stdin is None:
        raise ParameterError("question", "standard input is closed")
    question = sys.stdin.read() if args.question == "-" else args.question
    printer = _Printer(sys.stdout)
    if args.url:
        for piece in _ask_server(args, question):
            printer.show(piece)
    else:
        asyncio.run(_ask_here(args, question, printer))
    return 0


class _Printer:
    """Thinking dimmed on a terminal, between rules elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._thinking = False

    def show(self, piece: Piece) -> None:
        if piece.reasoning:
            self._enter()
            self._out.write(piece.reasoning)
        if piece.text:
            self._leave()
            self._out.write(piece.text)
        if piece.costs is not None:
            self._leave()
            self._out.write(f"\n{self._dim(_cost_line(piece))}\n")
        self._out.flush()

    def _enter(self) -> None:
        if not self._thinking:
            self._thinking = True
            self._out.write(DIM if self._tty else "--- thinking ---\n")

    def _leave(self) -> None:
        if self._thinking:
            self._thinking = False
            self._out.write(f"{PLAIN}\n\n" if self._tty else "\n--- answer ---\n")

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self._tty else text


def _cost_line(piece: Piece) -> str:
    costs = piece.costs or {}
    seconds = sum(costs[name] for name in ("queue_s", "prefill_s", "thinking_s", "answer_s"))
    tokens = f"{costs['prompt_tokens']} prompt ({costs['cached_tokens']} cached)"
    ended = f" (ended: {piece.thinking_end})" if piece.thinking_end else ""
    return (
        f"{tokens} + {costs['thinking_tokens']} thinking{ended} + {costs['answer_tokens']} answer tokens, "
        f"{costs['kv_byte_seconds'] / 1e6:.1f} MB·s of KV, {seconds:.1f} s"
    )


async def _ask_here(args: argparse.Namespace, question: str, printer: _Printer) -> None:
    from thinkfold.engine.async_engine import AsyncEngine
    from thinkfold.server.defaults import sampling_defaults

    thinking = ThinkingParams(enabled=False if args.no_thinking else None, reasoning_effort=args.depth)
    engine = await AsyncEngine.start(EngineConfig(model=args.model or "pebble"))
    try:
        given = {name: getattr(args, name) for name in ("max_tokens", "temperature", "seed")}
        given = {name: value for name, value in given.items() if value is not None}
        sampling = SamplingParams(**{**sampling_defaults(engine.prompts.source), **given})
        async for piece in _pieces(engine, question, sampling, thinking):
            printer.show(piece)
    finally:
        await engine.stop()


async def _pieces(
    engine: Any, question: str, sampling: SamplingParams, thinking: ThinkingParams
) -> AsyncIterator[Piece]:
    messages = [{"role": "user", "content": question}]
    prompt = engine.prompts.encode_chat(messages, enable_thinking=thinking.template_switch)
    ended: str | None = None
    async for output in engine.generate(prompt, sampling, thinking):
        if output.error is not None:
            raise RequestFailedError(output.error)
        for news in output.outputs:
            yield Piece(news.reasoning, news.text)
            ended = news.thinking_end_reason
        if output.finished:
            yield Piece(costs=asdict(output.costs), thinking_end=ended)


def _ask_server(args: argparse.Namespace, question: str) -> Iterator[Piece]:
    body: dict[str, Any] = {
        "model": args.model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "reasoning_effort": args.depth,
        "enable_thinking": False if args.no_thinking else None,
    }
    data = json.dumps({k: v for k, v in body.items() if v is not None}).encode()
    url = args.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    if not url.startswith(("http://", "https://")):
        raise ParameterError("url", "must start with http:// or https://")
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as lines:
            yield from _read_events(lines)
    except urllib.error.HTTPError as error:
        raise ThinkfoldError(_server_message(error)) from None
    except urllib.error.URLError as error:
        raise ThinkfoldError(f"cannot reach {args.url}: {error.reason}") from None
    except (http.client.HTTPException, ValueError) as error:  # no URL, no HTTP or no JSON
        raise ThinkfoldError(f"cannot talk to {args.url}: {type(error).__name__}: {error}") from None


def _read_events(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Pieces of a stream. Raises RequestFailedError if it does not come to its end."""
    ended: str | None = None
    for raw in lines:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RequestFailedError(event["error"]["message"])
        for choice in event.get("choices", ()):
            ended = choice.get("thinking_end_reason") or ended
            delta = choice["delta"]
            yield Piece(delta.get("reasoning") or "", delta.get("content") or "")
        if "thinkfold" in event:
            yield Piece(costs=event["thinkfold"]["costs"], thinking_end=ended)
    raise RequestFailedError("the stream broke off before its end")


def _server_message(error: urllib.error.HTTPError) -> str:
    try:
        return f"{json.loads(error.read())['error']['message']} (HTTP {error.code})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {error.code}"
