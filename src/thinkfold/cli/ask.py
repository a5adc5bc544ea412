"""`thinkfold ask`: one question, thinking dimmed, then the answer, then one line of costs."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from thinkfold.cli.engine_client import API_KEY, key_headers
from thinkfold.cli.fold_flags import add_fold_flags, fold_params, fold_wish
from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, RequestFailedError, ThinkfoldError
from thinkfold.types import EFFORT_BUDGETS, FoldParams, SamplingParams, Segment, ThinkingParams

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the reply, or a fold; the last one has costs, how thinking ended, what was `clamped` (`Clamp`)."""

    reasoning: str = ""
    text: str = ""
    fold: Mapping[str, Any] | None = None
    costs: Mapping[str, Any] | None = None
    thinking_end: str | None = None
    clamped: Sequence[dict[str, Any]] = ()


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ask",
        help="ask one question and watch the model think",
        description=f"Thinking, then the answer, then what it cost. A key for --url comes from {API_KEY}.",
        allow_abbrev=False,
    )
    parser.add_argument("question", help="the question, or - to read it from standard input")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000 (default: run the model here)")
    parser.add_argument("--model", help="a folder, a hub id or pebble; with --url, the served name")
    parser.add_argument("--depth", choices=list(EFFORT_BUDGETS), help="how long it may think (default: medium)")
    parser.add_argument("--no-thinking", action="store_true", help="answer at once")
    parser.add_argument("--max-tokens", type=int, help="tokens of the reply (default: up to the model's length)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, help="repeat a sampled reply")
    add_fold_flags(parser)
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
        self._in_line = False

    def show(self, piece: Piece) -> None:
        if piece.reasoning:
            self._enter()
            self._write(piece.reasoning)
        if piece.text:
            self._leave()
            self._write(piece.text)
        if piece.fold is not None:
            if self._in_line:
                self._write("\n")
            self._write(self._dim(_fold_line(piece.fold)) + "\n")
        if piece.costs is not None:
            self._leave()
            lines = [*map(_clamp_line, piece.clamped), _cost_line(piece)]
            self._out.writelines(f"\n{self._dim(line)}\n" for line in lines)
        self._out.flush()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._in_line = not text.endswith("\n")

    def _enter(self) -> None:
        if not self._thinking:
            self._thinking = True
            self._out.write(DIM if self._tty else "--- thinking ---\n")

    def _leave(self) -> None:
        if self._thinking:
            self._thinking = False
            self._out.write(f"{PLAIN}\n\n" if self._tty else "\n--- answer ---\n")

    def _dim(self, text: str) -> str:
        if not self._tty:
            return text
        return f"{DIM}{text}{PLAIN}{DIM if self._thinking else ''}"  # thinking goes on dimmed


def _fold_line(fold: Mapping[str, Any]) -> str:
    tokens = fold["end"] - fold["start"]
    segment = "" if fold["segment"] is None else f"segment {fold['segment']}, "
    error = "" if fold["error"] is None else f", estimated error {fold['error']:.3f}"
    if fold["refused"]:
        return f"[fold refused: {segment}{tokens} tokens stay as they are{error}]"
    if fold.get("quantised"):
        return f"[quantised: {segment}{tokens} tokens kept in 4 bits, {fold['pages_freed']} pages freed{error}]"
    return f"[fold: {segment}{tokens} tokens → {fold['entries']:.0f} entries, {fold['pages_freed']} pages freed{error}]"


def _clamp_line(clamp: dict[str, Any]) -> str:
    asked = "no limit" if clamp["asked"] is None else clamp["asked"]
    return f"[{clamp['field']}: {clamp['granted']} instead of {asked}, lowered by {clamp['by']}]"


def _cost_line(piece: Piece) -> str:
    costs = piece.costs or {}
    count, kv = costs["tokens"], costs["kv"]
    passed = sum(seconds for name, seconds in costs["time"].items() if name != "device_s")  # which lies within the rest
    tokens = f"{count['prompt']} prompt ({count['cached']} cached)"
    notes = [f"ended: {piece.thinking_end}"] if piece.thinking_end else []
    compacted = ((costs.get(f"{kind}_tokens"), kind) for kind in ("folded", "quantised"))
    notes += [f"{tokens} {kind}" for tokens, kind in compacted if tokens]
    thinking = f"{count['thinking']} thinking" + (f" ({', '.join(notes)})" if notes else "")
    return (
        f"{tokens} + {thinking} + {count['answer']} answer tokens, "
        f"{kv['byte_seconds'] / 1e6:.1f} MB·s of KV, {passed:.1f} s"
    )


async def _ask_here(args: argparse.Namespace, question: str, printer: _Printer) -> None:
    from thinkfold.engine.async_engine import AsyncEngine
    from thinkfold.server.defaults import sampling_defaults

    thinking = ThinkingParams(enabled=False if args.no_thinking else None, reasoning_effort=args.depth)
    fold = fold_params(args)
    engine = await AsyncEngine.start(EngineConfig(model=args.model or "pebble"))
    try:
        given = {name: getattr(args, name) for name in ("max_tokens", "temperature", "seed")}
        given = {name: value for name, value in given.items() if value is not None}
        sampling = SamplingParams(**{**sampling_defaults(engine.prompts.source), **given})
        async for piece in _pieces(engine, question, sampling, thinking, fold):
            printer.show(piece)
    finally:
        await engine.stop()


async def _pieces(
    engine: Any, question: str, sampling: SamplingParams, thinking: ThinkingParams, fold: FoldParams
) -> AsyncIterator[Piece]:
    from thinkfold.server.folds import fold_data
    from thinkfold.server.reply import three_costs

    messages = [{"role": "user", "content": question}]
    effort = thinking.reasoning_effort
    prompt = engine.prompts.encode_chat(messages, enable_thinking=thinking.template_switch, reasoning_effort=effort)
    ended: str | None = None
    segments: list[Segment] = []
    async for output in engine.generate(prompt, sampling, thinking, fold):
        if output.error is not None:
            raise RequestFailedError(output.error)
        for news in output.outputs:
            yield Piece(news.reasoning, news.text)
            segments += news.segments
            for done in news.folds:
                yield Piece(fold=fold_data(news.index, done, segments))
            ended = news.thinking_end_reason
        if output.finished:
            clamped = [asdict(clamp) for clamp in output.limits.clamped]
            yield Piece(costs=three_costs(output.costs), thinking_end=ended, clamped=clamped)


def _ask_server(args: argparse.Namespace, question: str) -> Iterator[Piece]:
    body: dict[str, Any] = {
        "model": args.model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "thinkfold": {"fold": fold_wish(args), "events": True},
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
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **key_headers()})
        with urllib.request.urlopen(request) as lines:
            yield from _read_events(lines)
    except urllib.error.HTTPError as error:
        raise ThinkfoldError(_server_message(error)) from None
    except urllib.error.URLError as error:
        raise ThinkfoldError(f"cannot reach {args.url}: {error.reason}") from None
    except (http.client.HTTPException, ConnectionError, ValueError) as error:  # no URL, no HTTP or no JSON
        raise ThinkfoldError(f"cannot talk to {args.url}: {type(error).__name__}: {error}") from None


def _read_events(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Pieces of a stream. Raises RequestFailedError if it does not come to its end."""
    ended: str | None = None
    for raw in _until_reset(lines):
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
        if "fold" in event.get("thinkfold", ()):
            yield Piece(fold=event["thinkfold"]["fold"])
        if "thinkfold" in (event.get("usage") or ()):
            clamped = event.get("thinkfold", {}).get("policy", {}).get("clamped", ())
            yield Piece(costs=event["usage"]["thinkfold"], thinking_end=ended, clamped=clamped)
    raise RequestFailedError("the stream broke off before its end")


def _until_reset(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream; a connection that is reset has ended."""
    with suppress(ConnectionError):
        yield from lines


def _server_message(error: urllib.error.HTTPError) -> str:
    try:
        return f"{json.loads(error.read())['error']['message']} (HTTP {error.code})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {error.code}"
