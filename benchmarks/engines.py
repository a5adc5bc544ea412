"""The same work on every engine: how long, how fast, and in how much KV memory?

Each engine is started as a server of its own, one after the other, with the same weights, the same tokens of KV and the
same slots, and is asked over HTTP by the same closed loop of clients: raw text that the model's chat template made, so
that all see the same prompt. Decoding is greedy. `maths` ends where the model ends and is judged; elsewhere lengths are
forced, and an engine that makes another number of tokens gets no row of numbers. What is not installed, cannot do the
work or takes longer than `--limit` gets a row with the reason.

Workloads: `agents` many short answers behind one system prompt; `maths` questions of a suite, thought through;
`chains` agents of many steps, each of which sends all that came before; `short_1k` and `long_32k` the two ends of
thinking. `--scale` multiplies forced lengths, for models and machines that cannot do the whole. Beside thinkfold as it
comes stand its eager folds (`thinkfold-eager`), balanced stops (`-stop`) and votes (`-vote`; they sample, and lengths
cannot be forced on them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import AutoTokenizer

from thinkfold.cli import peers, rows
from thinkfold.cli.answers import wilson
from thinkfold.cli.evaluation import suite_questions
from thinkfold.cli.load import Ask, Client, OutOfTime, Reply, Run, Session
from thinkfold.cli.peers import Place
from thinkfold.config import EngineConfig
from thinkfold.engine.planning import Card, Planner
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.pebble import SUITES, pebble_path, problems
from thinkfold.scheduler.simulation import percentile
from thinkfold.scheduler.twins import common

OFFSET = 300_000  # of the first problem of a suite
SYSTEM = 512  # tokens of the system prompt that all agents share
OPEN = "<think>\n"  # before an output that is forced, and must be thinking
WARM = 10_000  # number of a text that no workload has
ANY_CARD = Card(1 << 50, 1e12, 0)  # what a token takes is the same on all
STEPS, OBSERVATION, ACTION = 30, 128, 48  # of a chain: steps, tokens that a tool returns, tokens that the agent says


class Texts:
    """Prompts by the model's own tokenizer and chat template, with text of a given number of tokens in them."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        questions = (problem.question for problem in problems("medium", 400, OFFSET + seed))
        self._ids = [token for question in questions for token in self.ids(question + " ")]

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def some(self, number: int, tokens: int) -> str:
        """About so many tokens of text, another one for each number."""
        start = number * 97 % (len(self._ids) - tokens)
        return self._tokenizer.decode(self._ids[start : start + tokens])

    def chat(self, messages: Sequence[dict[str, str]], *, thinks: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=thinks
        )

    def ask(self, prompt: str, max_tokens: int, before: str | None = None, **more: Any) -> Ask:
        """A request whose prompt begins as `before`, an earlier text, does."""
        ids = self.ids(prompt)
        known = common(ids, self.ids(before), len(ids)) if before is not None else 0
        return Ask(prompt, len(ids), max_tokens, known, **more)

    @property
    def ends(self) -> list[int]:
        return [self._tokenizer.eos_token_id]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each workload, and how long forced outputs are."""

    agents: int
    maths: int
    chains: int
    short: int
    long: int
    suite: str
    scale: float
    max_len: int

    def length(self, tokens: int) -> int:
        return max(1, round(tokens * self.scale))


def agents(texts: Texts, sizes: Sizes) -> list[Session]:
    """One short answer each; all but the first find the system prompt known."""
    system = {"role": "system", "content": texts.some(0, SYSTEM)}
    prompts = [
        texts.chat([system, {"role": "user", "content": texts.some(i + 1, 24)}], thinks=False)
        for i in range(sizes.agents)
    ]
    asks = [texts.ask(p, 32, prompts[0] if i else None, forced=True) for i, p in enumerate(prompts)]
    return [partial(_once, ask) for ask in asks]


def maths(texts: Texts, sizes: Sizes) -> list[Session]:
    """Problems with their thinking, to the model's own end."""
    found: list[Session] = []
    for question in suite_questions(sizes.suite, sizes.maths, OFFSET):
        prompt = texts.chat([{"role": "user", "content": question.text}], thinks=True)
        room = sizes.max_len - texts.count(prompt) - 1
        found.append(partial(_once, texts.ask(prompt, room, judge=question.judge)))
    return found


def chains(texts: Texts, sizes: Sizes) -> list[Session]:
    """Agents whose every step sends all that was said before."""
    return [partial(_chain, texts, number, sizes.length(STEPS)) for number in range(sizes.chains)]


def thinkers(texts: Texts, count: int, tokens: int, max_len: int, first: int = 0, forced: bool = True) -> list[Session]:
    """One long output each, of that many tokens, to texts from number `first` on.

    Raises ThinkfoldError where they are too long for a sequence.
    """
    contents = [texts.some(number, 64) for number in range(first, first + count)]
    prompts = [texts.chat([{"role": "user", "content": content}], thinks=True) + OPEN for content in contents]
    asks = [texts.ask(prompt, tokens, forced=forced) for prompt in prompts]
    if (longest := max(ask.tokens for ask in asks) + tokens) > max_len:
        raise ThinkfoldError(f"needs {longest} tokens, a sequence holds {max_len} (--scale makes outputs shorter)")
    return [partial(_once, ask) for ask in asks]


WORKLOADS: dict[str, Callable[[Texts, Sizes], list[Session]]] = {
    "agents": agents,
    "maths": maths,
    "chains": chains,
    "short_1k": lambda texts, sizes: thinkers(texts, sizes.short, sizes.length(1024), sizes.max_len),
    "long_32k": lambda texts, sizes: thinkers(
        texts, sizes.long, sizes.length(32_768), sizes.max_len, first=sizes.short
    ),
}


async def _once(ask: Ask) -> AsyncGenerator[Ask, str]:
    yield ask


async def _chain(texts: Texts, number: int, steps: int) -> AsyncGenerator[Ask, str]:
    messages = [{"role": "system", "content": texts.some(number + 1, SYSTEM // 2)}]
    before: str | None = None
    for step in range(steps):
        messages.append({"role": "user", "content": texts.some(number * 100 + step, OBSERVATION)})
        prompt = texts.chat(messages, thinks=False)
        said = yield texts.ask(prompt, ACTION, before, forced=True)
        messages.append({"role": "assistant", "content": said})
        before = prompt + said


def metrics(run: Run, slo_ttft: float, slo_tpot: float, kv_share: float) -> dict[str, float]:
    """What a row holds; a number that the engine does not tell is not in it.

    `kv_share` are the bytes of the KV pool over the sessions that ran at once.
    """
    replies, tokens = run.replies, sum(reply.tokens for reply in run.replies)
    good = sum(_kept(reply, slo_ttft, slo_tpot) for reply in replies)
    found: dict[str, float] = {
        "n": len(replies),
        "p50_s": percentile([reply.seconds for reply in replies], 0.5),
        "p99_s": percentile([reply.seconds for reply in replies], 0.99),
        "requests_per_s": len(replies) / run.seconds,
        "output_tokens_per_s": tokens / run.seconds,
        "output_tokens_mean": tokens / len(replies),
        "goodput": good / run.seconds,
        "seconds": run.seconds,
    }
    if any(reply.first_s < reply.seconds for reply in replies):  # it streams
        found["ttft_s"] = median(reply.first_s for reply in replies)
    if run.kv_use_peak is not None:
        found |= {"kv_use_peak": run.kv_use_peak, "kv_session_bytes": run.kv_use_peak * kv_share}
    told = [reply for reply in replies if reply.cached is not None]
    if len(told) == len(replies):
        cached, known = (sum(values) for values in zip(*((r.cached or 0, r.ask.known) for r in told), strict=True))
        found["prefix_hit_rate"] = cached / sum(reply.ask.tokens for reply in told)
        if known:
            found["prefill_reuse"] = cached / known
    judged = [reply.ask.judge(reply.text) for reply in replies if reply.ask.judge is not None]
    if judged:
        low, high = wilson(sum(judged), len(judged))
        found |= {"accuracy": fmean(judged), "ci95_low": low, "ci95_high": high}
    return found


def _kept(reply: Reply, slo_ttft: float, slo_tpot: float) -> bool:
    """Whether the first text and then each token came as fast as promised."""
    rest = (reply.seconds - reply.first_s) / max(1, reply.tokens - 1)
    return reply.first_s <= slo_ttft and rest <= slo_tpot


async def ask_all(
    url: str, peer: peers.Peer, names: Sequence[str], texts: Texts, sizes: Sizes, args: argparse.Namespace
) -> list[tuple[str, dict[str, float] | str]]:
    """Each workload's numbers on one server, or why there are none; it ends behind one that ran out of time."""
    found: list[tuple[str, dict[str, float] | str]] = []
    client = Client(url, peer, texts.count)
    try:
        warm = thinkers(texts, min(2, args.clients), 16, sizes.max_len, first=WARM, forced=False)
        await client.run(warm, args.clients, args.limit)
        for name in names:
            late = False
            try:
                sessions = WORKLOADS[name](texts, sizes)
                run = await client.run(sessions, args.clients, args.limit)
                kv_share = args.pool_bytes / min(len(sessions), args.clients)
                found.append((name, metrics(run, args.slo_ttft, args.slo_tpot, kv_share)))
            except ThinkfoldError as error:
                found.append((name, str(error)))
                late = isinstance(error, OutOfTime)
            print(f"  {name}: {_shown(found[-1][1])}", file=sys.stderr, flush=True)
            if late:
                break
    finally:
        await client.close()
    return found


def _shown(told: dict[str, float] | str) -> str:
    return told if isinstance(told, str) else "  ".join(f"{name} {value:.4g}" for name, value in told.items())


def measure(name: str, make: Callable[[], peers.Peer], args: argparse.Namespace, texts: Texts, sizes: Sizes) -> Any:
    """One engine's version and results; a reason stands for all that are left where it does not run."""
    python, version = args.pythons.get(name, sys.executable), "none"
    found: list[tuple[str, dict[str, float] | str]] = []
    print(name, file=sys.stderr, flush=True)
    try:
        peer = make()
        version = peers.version_of(peer, python)
        while left := args.workload[len(found) :]:
            with (
                tempfile.TemporaryDirectory() as folder,
                peers.served(peer, python, Path(folder) / "server.log", args.patience) as url,
            ):
                found += asyncio.run(ask_all(url, peer, left, texts, sizes, args))
    except ThinkfoldError as error:
        print(f"  {error}", file=sys.stderr, flush=True)
        found += [(workload, str(error)) for workload in args.workload[len(found) :]]
    return version, found


def table(kept: Sequence[dict[str, Any]]) -> str:
    """Engines below each other, workload after workload."""
    names = ("p50_s", "p99_s", "ttft_s", "output_tokens_per_s", "goodput", "kv_use_peak", "prefill_reuse", "accuracy")
    lines = [f"{'':28}" + "".join(f"{name:>20}" for name in names)]
    for row in sorted(kept, key=lambda row: row["case"].split("/")[::-1]):
        cells = [row["metrics"].get(name) for name in names]
        shown = "".join(f"{'' if cell is None else format(cell, '.3g'):>20}" for cell in cells)
        lines.append(f"{row['case']:28}" + (shown if row["metrics"] else "  " + row["versions"]["reason"][:160]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every engine, print and keep a row for each workload."""
    args = parse(argv)
    texts, place = Texts(args.model, args.seed), place_of(args)
    args.pool_bytes = place.pool_tokens * place.token_bytes
    sizes = Sizes(args.agents, args.maths, args.chains, args.short, args.long, args.suite, args.scale, place.max_len)
    makers, kept = peers.engines(place, texts.ends), []
    for name in args.engine or list(makers):
        version, results = measure(name, makers[name], args, texts, sizes)
        for workload, told in results:
            extra = {
                "engine": version,
                "model": args.model.name,
                "suite": args.suite,
                "scale": str(args.scale),
                "clients": str(args.clients),
            }
            extra |= {"pool_tokens": str(args.pool_tokens)} | ({"reason": told} if isinstance(told, str) else {})
            numbers = {} if isinstance(told, str) else told
            case = f"{name}/{workload}"
            row = rows.make_row("engines", case, numbers, seed=args.seed, device=args.device, extra_versions=extra)
            kept.append(row)
            if not args.no_record:
                rows.keep(row)
            if args.json:
                print(json.dumps(row), flush=True)
    if not args.json:
        print(table(kept))
    return 0


def place_of(args: argparse.Namespace) -> Place:
    """What every engine is given. Raises ParameterError for a pool that holds no sequence."""
    config = EngineConfig(model=str(args.model), dtype=args.dtype, max_model_len=args.max_len)
    planner = Planner(config, ANY_CARD)
    max_len, token_bytes = planner.max_model_len, planner.pool("model").entry_bytes
    if args.pool_tokens < max_len:
        raise ParameterError("pool_tokens", f"must hold one sequence of {max_len} tokens, got {args.pool_tokens}")
    return Place(args.model, args.gguf, args.device, args.dtype, max_len, args.slots, args.pool_tokens, token_bytes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench engines", description=(__doc__ or "").partition("\n")[0])
    names = list(peers.engines(Place(Path(), None, "cpu", "float32", 1, 1, 1, 1), []))
    parser.add_argument("--engine", action="append", choices=names, help="may be repeated (default: all)")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated (default: all)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter in which an engine lies"
    )
    parser.add_argument(
        "--model", type=Path, default=pebble_path(), help="a model folder (default: the embedded model)"
    )
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp (Pebble: scripts/pebble_gguf.py)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-len", type=int, help="tokens of a sequence (default: the model's own)")
    parser.add_argument("--slots", type=int, default=32, help="sequences at once")
    parser.add_argument("--clients", type=int, default=32, help="sessions at once")
    parser.add_argument("--pool-tokens", type=int, default=65_536, help="of KV that every engine may hold")
    parser.add_argument("--agents", type=int, default=128, help="short answers")
    parser.add_argument("--maths", type=int, default=32, help="questions of --suite")
    parser.add_argument("--suite", choices=list(SUITES), default="medium")
    parser.add_argument("--chains", type=int, default=8, help="agents of 30 steps")
    parser.add_argument("--short", type=int, default=32, help="outputs of 1k tokens")
    parser.add_argument("--long", type=int, default=16, help="outputs of 32k tokens")
    parser.add_argument("--scale", type=float, default=1.0, help="times forced lengths of outputs and steps")
    parser.add_argument("--slo-ttft", type=float, default=10.0, help="seconds to the first text that count as good")
    parser.add_argument("--slo-tpot", type=float, default=0.2, help="seconds a token that count as good")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that an engine may take to start")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a workload may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    args.workload = args.workload or list(WORKLOADS)
    args.pythons = peers.interpreters(args.python)
    for name in ("slots", "clients", "pool_tokens", "agents", "maths", "chains", "short", "long", "scale", "limit"):
        if getattr(args, name) <= 0:
            raise ParameterError(name, "must be more than 0")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThinkfoldError as error:
        sys.exit(f"thinkfold bench engines: {error}")
