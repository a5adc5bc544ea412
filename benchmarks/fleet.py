"""What does the door of a fleet cost, and do conversations find the replica that knows them?

`door/…`: the same requests to `thinkfold serve` and to the door of a fleet with one replica of the same engine, in
turns, both running on this machine, each core in a process of its own, as on a GPU; what differs is the way: Ray's
proxy, the ingress, one stream of events. `talks/…`: conversations with one system prompt on several replicas, with
routing by affinity and at random. A later turn has hit if all that it repeats of the prompt before was in a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from thinkfold.cli import rows
from thinkfold.cli.deploy import deployed
from thinkfold.cli.fleet_settings import parse_deployment
from thinkfold.cli.peers import Peer, free_port, served
from thinkfold.errors import ThinkfoldError
from thinkfold.pebble import problems

OFFSET = 310_000  # of the first problem of the suite
PATIENCE_S = 180.0
ROUNDING = 32  # tokens of a prompt that its next turn may not find: half a page, and how the reply was opened
SYSTEM = (
    "You are a careful clerk. You add, subtract and compare, and you answer with the number that was asked for. " * 4
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Seconds to the first text and to the end; prompt tokens, and those that were found in a cache."""

    first_s: float
    seconds: float
    tokens: int
    prompt: int
    cached: int
    text: str


async def ask(http: httpx.AsyncClient, messages: Sequence[Mapping[str, str]], max_tokens: int, **more: Any) -> Reply:
    """Stream one chat. Raises ThinkfoldError where it fails."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}
    body |= {"stream_options": {"include_usage": True}}
    began, first, usage, text = time.perf_counter(), None, {}, ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if answer.status_code != 200 or "error" in event:
                raise ThinkfoldError(f"a request failed: {line[:300]}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                said = choice["delta"].get("content") or ""
                if first is None and (said or choice["delta"].get("reasoning")):
                    first = time.perf_counter() - began
                text += said
    if not usage:
        raise ThinkfoldError(f"a request failed with status {answer.status_code}")
    seconds, cached = time.perf_counter() - began, usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(first or seconds, seconds, usage["completion_tokens"], usage["prompt_tokens"], cached, text)


def engine_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": "pebble", "max_model_len": 4096, "max_num_seqs": 8, "kv_cache_bytes": args.kv_mib * 2**20}


@contextmanager
def fleet(args: argparse.Namespace, replicas: int, routing: str, **engine: Any) -> Iterator[str]:
    """The address of a running fleet with one pool."""
    pool = {"budget": 2048, "replicas": replicas, "cpus": 0.1, "drain_s": 1}
    written = {"port": free_port(), "routing": routing, "engine": engine_of(args) | engine, "pools": {"all": pool}}
    deployment = parse_deployment(written)
    with deployed([deployment]):
        address = deployment.fleet.url.removesuffix("/v1")
        asyncio.run(_until_open(address, replicas))
        yield address


async def _until_open(address: str, replicas: int) -> None:
    until = time.monotonic() + PATIENCE_S
    wanted = f'thinkfold_pool_replicas{{pool="all",state="open"}} {replicas}.0'
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as http:
        while wanted not in (await http.get("/metrics")).text:
            if time.monotonic() > until:
                raise ThinkfoldError("the fleet does not become ready")
            await asyncio.sleep(0.2)


def door(args: argparse.Namespace) -> dict[str, float]:
    """One server and one fleet, side by side."""
    flags = {name.replace("_", "-"): value for name, value in engine_of(args).items() if name != "model"}
    flags |= {"own-process": True, "no-turn-ahead": True}
    peer = Peer("thinkfold", ["-m", "thinkfold", "serve", "pebble"], flags)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with (
            served(peer, sys.executable, log, PATIENCE_S) as url,
            fleet(args, 1, "affinity", turn_ahead=False) as address,
        ):
            return asyncio.run(_door(url, address, args))


async def _door(direct: str, through: str, args: argparse.Namespace) -> dict[str, float]:
    places = {"direct": direct, "fleet": through}
    clients = {name: httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) for name, url in places.items()}
    asked = [[{"role": "user", "content": f"What is {number} + 4?"}] for number in range(args.requests)]
    questions = [[{"role": "user", "content": each.question}] for each in problems("medium", 8, OFFSET)]
    one: dict[str, list[float]] = {name: [] for name in places}
    health: dict[str, list[float]] = {name: [] for name in places}
    rates: dict[str, list[float]] = {name: [] for name in places}
    try:
        for name in places:
            await ask(clients[name], asked[0], 8)
        for number, messages in enumerate(asked):  # in turns, each first every other time
            for name in sorted(places, reverse=bool(number % 2)):
                one[name].append((await ask(clients[name], messages, 1)).seconds)
                health[name].append(await _ask_health(clients[name]))
        for number in range(args.rounds):
            for name in sorted(places, reverse=bool(number % 2)):
                began = time.perf_counter()
                replies = await asyncio.gather(*(ask(clients[name], each, 96) for each in questions))
                rates[name].append(sum(each.tokens for each in replies) / (time.perf_counter() - began))
    finally:
        for client in clients.values():
            await client.aclose()
    gaps = {what: _gaps(times) for what, times in (("one_token", one), ("health", health))}
    return {
        "n": len(asked),
        "one_token_p50_s": median(one["fleet"]),
        "direct_one_token_p50_s": median(one["direct"]),
        "one_token_overhead_p50_s": median(gaps["one_token"]),
        "health_p50_s": median(health["fleet"]),
        "direct_health_p50_s": median(health["direct"]),
        "health_overhead_p50_s": median(gaps["health"]),
        "tokens_per_s": median(rates["fleet"]),
        "direct_tokens_per_s": median(rates["direct"]),
    }


def _gaps(times: Mapping[str, Sequence[float]]) -> list[float]:
    return [through - direct for direct, through in zip(times["direct"], times["fleet"], strict=True)]


async def _ask_health(http: httpx.AsyncClient) -> float:
    began = time.perf_counter()
    (await http.get("/health")).raise_for_status()
    return time.perf_counter() - began


def talks(args: argparse.Namespace, routing: str) -> dict[str, float]:
    """Conversations, so many at a time, on `args.replicas`."""
    with fleet(args, args.replicas, routing) as address:
        return asyncio.run(_talks(address, args))


async def _talks(address: str, args: argparse.Namespace) -> dict[str, float]:
    questions = [each.question for each in problems("medium", args.talks * args.turns, OFFSET)]
    later: list[Reply] = []
    hits: list[bool] = []
    numbers = iter(range(args.talks))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            asked, before = questions[number * args.turns : (number + 1) * args.turns], None
            async for reply in _talk(http, asked, args.max_tokens):
                if before is not None:
                    later.append(reply)
                    hits.append(reply.cached >= before.prompt - ROUNDING)
                before = reply

    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as http:
        await asyncio.gather(*(client(http) for _ in range(args.clients)))
        text = (await http.get("/metrics")).text
    routed = {
        why: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        for why in ("conversation", "spill", "free", "random")
        if line.startswith("thinkfold_pool_routed_total{") and f'why="{why}"' in line
    }
    share = sum(each.cached for each in later) / sum(each.prompt for each in later)
    return {
        "n": len(later),
        "hit_rate": sum(hits) / len(hits),
        "cached_share": share,
        "ttft_p50_s": median(each.first_s for each in later),
        **{f"routed_{why}": count for why, count in routed.items()},
    }


async def _talk(http: httpx.AsyncClient, questions: Sequence[str], max_tokens: int) -> AsyncIterator[Reply]:
    """The replies to all turns."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = await ask(http, messages, max_tokens, thinking_token_budget=max_tokens // 2)
        messages.append({"role": "assistant", "content": reply.text or "-"})
        yield reply


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", choices=("door", "talks"), help="default: both")
    parser.add_argument("--requests", type=int, default=200, help="of the case door")
    parser.add_argument("--rounds", type=int, default=6, help="of eight streams at once, each way")
    parser.add_argument("--replicas", type=int, default=3, help="of the case talks")
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=6, help="conversations at a time")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a reply")
    parser.add_argument("--kv-mib", type=int, default=64, help="of each replica")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    for name in ("requests", "rounds", "replicas", "talks", "clients", "max_tokens", "kv_mib"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if args.turns < 2:
        parser.error("--turns: must be at least 2")
    asked: dict[str, Callable[[], Mapping[str, float]]] = {}
    if not args.case or "door" in args.case:
        asked["door/1_replica"] = lambda: door(args)
    if not args.case or "talks" in args.case:
        for routing in ("affinity", "random"):
            asked[f"talks/{args.replicas}_replicas/{routing}"] = lambda routing=routing: talks(args, routing)
    for name, measure in asked.items():
        row = rows.make_row("fleet", name, measure())
        if not args.no_record:
            rows.keep(row)
        print(json.dumps(row) if args.json else f"{name}: {json.dumps(row['metrics'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
