"""How many long thinkers does one small KV pool carry, by admission and fold policy? Measured on the engine.

Pebble on its `long` suite; the pool holds three requests of mean length. A closed loop keeps more requests in the
system than can run; the first `--ramp` completions and what is unfinished after the last one that counts are left
out. `/ample` is the same arm in a pool that holds all that may run, `page/<size>` is eager folding in pages of that
size and the same bytes. The simulator then gets the same lengths: `sim_steps_ratio` is its number of engine steps over
the measured one. `pool/fp8` runs nothing: how many tokens does a pool of fp8 hold, and one of bf16?

On a machine that others use, `--counts` takes means over steps instead of seconds and leaves out every time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, cast

import torch

from thinkfold import AsyncEngine, EngineConfig, SamplingParams
from thinkfold.cli import rows
from thinkfold.cli.evaluation import Question, suite_questions
from thinkfold.cli.watched import WatchedCore
from thinkfold.engine.build import build_core
from thinkfold.engine.core import EngineCore
from thinkfold.engine.messages import ModelInfo
from thinkfold.kv.manager import KVManager
from thinkfold.runner.loader import pick_device
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Simulation, Window, Work, percentile
from thinkfold.types import RequestOutput

MEAN_TOKENS = 5507  # of a request of `long`: prompt, thinking and answer
LONGEST_TOKENS = 9000
ARMS: dict[str, dict[str, Any]] = {
    "off": {"fold_policy": "off"},
    "off_greedy": {"fold_policy": "off", "admission": "greedy"},
    "pressure": {"fold_policy": "pressure"},
    "eager": {"fold_policy": "eager"},
}
AT_ANSWER: dict[str, dict[str, Any]] = {
    "keep": {"fold_policy": "off"},
    "recycle": {"fold_policy": "off", "fold_at_answer": "recycle"},
    "swap": {"fold_policy": "off", "fold_at_answer": "swap"},
}
PAGE_SIZES = (8, 16, 32, 64)
TIMES = ("output_tokens_per_s", "seconds", "p99_s")  # left out under --counts


@dataclass(frozen=True, slots=True)
class Done:
    """One answered request as its client saw it."""

    seconds: float
    correct: bool
    output: RequestOutput


@dataclass(slots=True)
class Loop:
    """A closed loop: each client asks its next question as soon as its last one is answered."""

    engine: AsyncEngine
    questions: list[Question]
    wanted: int
    done: dict[int, Done] = field(default_factory=dict)  # by number, in the order of their ends
    work: dict[int, Work] = field(default_factory=dict)  # by number: its lengths so far
    asked: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, clients: int) -> None:
        """Until `wanted` are answered; what still runs then is cut off."""
        tasks = [asyncio.create_task(self._client()) for _ in range(clients)]
        full = asyncio.create_task(self.full.wait())
        try:
            ended, _ = await asyncio.wait([full, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a client ends by its error only
        finally:
            for task in (full, *tasks):
                task.cancel()
            await asyncio.gather(full, *tasks, return_exceptions=True)

    async def _client(self) -> None:
        for _ in itertools.count():
            number, self.asked = self.asked, self.asked + 1
            question = self.questions[number % len(self.questions)]
            prompt = self.engine.prompts.encode_chat([{"role": "user", "content": question.text}])
            started = time.perf_counter()
            output = await self._ask(number, prompt)
            correct = question.judge(output.outputs[0].text)
            self.done[number] = Done(time.perf_counter() - started, correct, output)
            if len(self.done) >= self.wanted:
                self.full.set()

    async def _ask(self, number: int, prompt: Sequence[int]) -> RequestOutput:
        total: RequestOutput | None = None
        async for output in self.engine.generate(prompt, SamplingParams(temperature=0.0, seed=number)):
            if total is None:
                total = output
            else:
                total.merge(output)
            costs, ends = output.costs, tuple(segment.end for segment in total.outputs[0].segments)
            self.work[number] = Work(len(prompt), costs.thinking_tokens, max(1, costs.answer_tokens), ends)
        assert total is not None
        return total


async def measure(case: str, config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    """Run one case on the engine, then the same lengths on the simulator."""
    kept: list[WatchedCore] = []

    def build(config: EngineConfig) -> tuple[EngineCore, ModelInfo]:
        core, model = build_core(config)
        kept.append(
            WatchedCore(core, lambda ended: ended >= args.ramp, lambda ended: ended >= wanted, by_steps=args.counts)
        )
        return cast(EngineCore, kept[0]), model

    wanted = args.ramp + args.completions
    questions = suite_questions(args.suite, wanted + args.clients, 0)
    engine = await AsyncEngine.start(config, build=build)
    try:
        loop = Loop(engine, questions, wanted)
        await loop.run(args.clients)
        longest = engine.model.max_model_len
    finally:
        await engine.stop()
    core = kept[0]
    if not core.numbers:
        raise SystemExit(f"{case}: the window has not closed")
    counted = list(loop.done.values())[args.ramp : wanted]
    predicted = simulated_steps(core.scheduler, config, loop, longest, args)
    numbers = core.numbers | {
        "completions": len(counted),
        "p99_s": percentile([done.seconds for done in counted], 0.99),
        "accuracy": fmean(done.correct for done in counted),
        "errors": sum(done.output.error is not None for done in counted),
        "thinking_tokens_mean": fmean(done.output.costs.thinking_tokens for done in counted),
        "sim_steps_ratio": predicted / core.steps,
    }
    return {name: value for name, value in numbers.items() if not (args.counts and name in TIMES)}


def pool_tokens(config: EngineConfig) -> dict[str, float]:
    """Tokens that the pool of a configuration holds, and how many more than in bf16."""
    cores = [build_core(c)[0] for c in (config, replace(config, kv_cache_dtype="model"))]
    held = [core.scheduler.kv.num_pages * config.page_size for core in cores]
    return {"pool_tokens": held[0], "pool_tokens_bf16": held[1], "pool_ratio": held[0] / held[1]}


def simulated_steps(real: Scheduler, config: EngineConfig, loop: Loop, longest: int, args: argparse.Namespace) -> int:
    """Engine steps of the same window by the simulator; what was cut off is as long as it was, or as the mean."""
    kv = KVManager(
        real.kv.num_pages,
        real.kv.page_size,
        enable_prefix_caching=False,
        num_heads=real.kv.num_heads,
        reserve_pages=real.kv.reserve_pages,
        host_pages=real.kv.host_pages,
    )
    heads, capacity = kv.num_heads, kv.capacity * kv.page_size
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        fold_counts=lambda entries, tokens: [min(entries, tokens)] * heads,
        admission=Admission(capacity, kv.page_size) if config.admission == "predicted" else None,
    )
    ended = [loop.work[number] for number in loop.done]
    mean = round(fmean(work.thinking for work in ended))
    first = next(iter(loop.done.values())).output

    def work(number: int) -> Work:
        seen = loop.work.get(number, ended[number % len(ended)])
        return seen if number in loop.done else replace(seen, thinking=max(seen.thinking, mean))

    outcome = Simulation(
        scheduler,
        map(work, itertools.count()),
        fold=first.fold,
        budget=first.policy.budget,
        max_tokens=longest - max(item.prompt for item in ended),
        clients=args.clients,
        window=Window(args.ramp, args.completions),
    ).run()
    return outcome.steps


def cases(args: argparse.Namespace, page_bytes: int) -> dict[str, EngineConfig]:
    """Every case with its engine's configuration."""
    small = 3 * args.mean_tokens // args.page_size * page_bytes
    ample = args.slots * -(-args.longest_tokens // args.page_size) * page_bytes
    base = EngineConfig(
        device=args.device,
        own_process=False,  # the bench looks into the core
        enable_prefix_caching=False,
        page_size=args.page_size,
        max_num_seqs=args.slots,
        max_waiting=args.clients,
        kv_cache_bytes=small,
    )
    made: dict[str, EngineConfig] = {}
    for arm, options in ARMS.items():
        made[f"pebble/{arm}"] = replace(base, **options)
        made[f"pebble/{arm}/ample"] = replace(base, **options, kv_cache_bytes=ample)
    for arm, options in AT_ANSWER.items():
        made[f"at_answer/{arm}"] = replace(base, **options, swap_space_bytes=small if arm == "swap" else 0)
    for size in PAGE_SIZES:
        made[f"page/{size}"] = replace(base, **ARMS["eager"], page_size=size)
    made["pool/fp8"] = replace(base, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    return made


async def probe(device: str, page_size: int) -> int:
    """Bytes of a page of the embedded model."""
    config = EngineConfig(device=device, own_process=False, page_size=page_size, kv_cache_bytes=64 << 20)
    engine = await AsyncEngine.start(config)
    try:
        return engine.model.page_bytes
    finally:
        await engine.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print and keep their rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench memory", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--case", action="append", help="one of the cases; may be repeated (default: all)")
    parser.add_argument("--completions", type=int, default=200, help="requests that count")
    parser.add_argument("--ramp", type=int, default=40, help="completions before they count")
    parser.add_argument("--slots", type=int, default=32, help="branches that may run at once (max_num_seqs)")
    parser.add_argument("--clients", type=int, help="requests that run or wait at any time (default: slots + 8)")
    parser.add_argument("--suite", default="long", help="where the questions come from")
    parser.add_argument("--mean-tokens", type=int, default=MEAN_TOKENS, help="the pool holds three requests of so many")
    parser.add_argument("--longest-tokens", type=int, default=LONGEST_TOKENS, help="an ample pool has so many a slot")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--counts", action="store_true", help="means over steps, and no times: for a busy machine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    args.clients = args.clients or args.slots + 8
    if min(args.completions, args.slots, args.clients) < 1 or args.ramp < 0:
        parser.error("completions, slots and clients must be at least 1, ramp at least 0")
    torch.set_num_threads(args.threads)
    known = cases(args, asyncio.run(probe(args.device, args.page_size)))
    chosen = args.case or list(known)
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for case in chosen:
        print(case, file=sys.stderr, flush=True)
        held = case.startswith("pool/")
        numbers = pool_tokens(known[case]) if held else asyncio.run(measure(case, known[case], args))
        versions = {"model": "pebble", "suite": args.suite, "threads": str(args.threads)}
        versions["means_over"] = "steps" if args.counts else "seconds"
        device = pick_device(args.device).type
        row = rows.make_row("memory", case, numbers, seed=0, device=device, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        print(json.dumps(row) if args.json else shown(row), flush=True)
    return 0


def shown(row: Mapping[str, Any]) -> str:
    return f"{row['case']:22} " + "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())


if __name__ == "__main__":
    sys.exit(main())
