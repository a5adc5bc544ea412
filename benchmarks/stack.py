"""What do the engine's pieces bring together, one on top of the other, where memory is short?

Every problem is answered by several samples and their majority. `none` asks for each sample by itself, without any
cache of prompts; `+prefix` forks all samples of a problem off one prefill; `+fp8` keeps KV in 8 bits; `+fold` folds
finished thinking under pressure and at the answer; `+stop` ends thinking that is settled (preset balanced); `+vote`
starts samples in waves and cancels what no longer matters. Each arm has all that the arms before it have, the same
problems and the same bytes of KV.

A closed loop of clients asks all problems; every one is answered and counts for accuracy, tokens and latency.
Throughput and use of the pool are those of the time until the last problem is begun, since after that the load falls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from thinkfold import AsyncEngine, EngineConfig, SamplingParams
from thinkfold.cli import rows
from thinkfold.cli.answers import final_answer, majority
from thinkfold.cli.evaluation import Question, generated, suite_questions
from thinkfold.cli.paired import paired_metrics
from thinkfold.cli.watched import WatchedCore
from thinkfold.engine.build import build_core
from thinkfold.engine.core import EngineCore
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.llm import collect
from thinkfold.pebble import SUITES
from thinkfold.runner.loader import pick_device
from thinkfold.scheduler.simulation import percentile
from thinkfold.types import ControlParams, Preset, RequestOutput, VoteParams

ARMS = ("none", "+prefix", "+fp8", "+fold", "+stop", "+vote")
OFFSET = 100_000  # of the first problem: far from those that anybody tunes on
SEEDS = 1000  # between two problems' samples


@dataclass(frozen=True, slots=True)
class Answered:
    """One problem: seconds from its first request to its last reply, and tokens of all samples, looks included."""

    seconds: float
    correct: bool
    tokens: int
    probe_tokens: int


@dataclass(slots=True)
class Loop:
    """A closed loop: each client asks its next problem as soon as it has the last one's answer."""

    ask: Callable[[Question], Awaitable[Answered]]
    questions: Sequence[Question]
    answered: dict[int, Answered] = field(default_factory=dict)
    begun: int = 0

    async def run(self, clients: int) -> list[Answered]:
        """All answers, in the order of the questions."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client())
        return [self.answered[question.index] for question in self.questions]

    @property
    def all_begun(self) -> bool:
        return self.begun == len(self.questions)

    async def _client(self) -> None:
        while not self.all_begun:
            question = self.questions[self.begun]
            self.begun += 1
            self.answered[question.index] = await self.ask(question)


def config_of(args: argparse.Namespace, arm: str, kv_cache_bytes: int) -> EngineConfig:
    """The engine of an arm."""
    has = set(ARMS[: ARMS.index(arm) + 1])
    return EngineConfig(
        device=args.device,
        dtype=args.dtype,
        own_process=False,  # the bench looks into the core
        max_num_seqs=args.slots,
        max_waiting=2 * args.clients * args.samples,
        kv_cache_bytes=kv_cache_bytes,
        enable_prefix_caching="+prefix" in has,
        kv_cache_dtype="fp8_e4m3" if "+fp8" in has else "model",
        fold_policy="pressure" if "+fold" in has else "off",
        fold_at_answer="recycle" if "+fold" in has else "keep",
    )


async def answer(engine: AsyncEngine, question: Question, arm: str, args: argparse.Namespace) -> Answered:
    """One problem, as the arm asks it."""
    prompt = engine.prompts.encode_chat([{"role": "user", "content": question.text}])
    sampling = SamplingParams(n=args.samples, temperature=args.temperature, seed=args.seed + SEEDS * question.index)
    has = set(ARMS[: ARMS.index(arm) + 1])
    control = ControlParams(Preset.BALANCED) if "+stop" in has else None
    vote = VoteParams(args.samples) if "+vote" in has else None
    started = time.perf_counter()
    if "+prefix" in has:
        outputs = [
            await collect(engine, prompt, replace(sampling, n=1) if vote else sampling, control=control, how=vote)
        ]
    else:
        assert sampling.seed is not None
        alone = [replace(sampling, n=1, seed=sampling.seed + k) for k in range(args.samples)]
        outputs = await asyncio.gather(*(collect(engine, prompt, one) for one in alone))
    return judged(question, outputs, time.perf_counter() - started)


def judged(question: Question, outputs: Sequence[RequestOutput], seconds: float) -> Answered:
    """The majority of all choices, which may be one that was chosen before. Raises ThinkfoldError for a failed one."""
    if failed := next((output.error for output in outputs if output.error), None):
        raise ThinkfoldError(f"problem {question.index}: {failed}")
    texts = [branch.text for output in outputs for branch in output.outputs]
    winner = majority([final_answer(text) for text in texts])
    return Answered(
        seconds,
        winner is not None and question.judge(texts[winner]),
        sum(generated(output.costs) for output in outputs),
        sum(output.costs.probe_tokens for output in outputs),
    )


async def measure(arm: str, args: argparse.Namespace, size: int) -> tuple[list[Answered], dict[str, float]]:
    """All answers of an arm, and what the core saw until the last problem was begun."""
    questions = suite_questions(args.suite, args.n, args.offset)
    kept: list[WatchedCore] = []
    engine: AsyncEngine
    loop = Loop(lambda question: answer(engine, question, arm, args), questions)

    def build(config: EngineConfig) -> tuple[EngineCore, ModelInfo]:
        core, model = build_core(config)
        kept.append(WatchedCore(core, lambda _: loop.begun > 0, lambda _: loop.all_begun, by_steps=False))
        return cast(EngineCore, kept[0]), model

    engine = await AsyncEngine.start(config_of(args, arm, size), build=build)
    try:
        answers = await loop.run(args.clients)
    finally:
        await engine.stop()
    return answers, kept[0].numbers


def metrics(
    answers: Sequence[Answered], seen: dict[str, float], reference: Sequence[Answered], seconds: float
) -> dict[str, float]:
    """One arm's numbers, paired with the first arm's."""
    tokens = sum(one.tokens for one in answers)
    names = ("output_tokens_per_s", "kv_pool_use_mean", "running_mean", "forced_preemptions", "folds")
    return {
        **paired_metrics([(ref.correct, one.correct) for ref, one in zip(reference, answers, strict=True)]),
        "tokens": tokens / len(answers),
        "tokens_ratio": tokens / sum(one.tokens for one in reference),
        "probe_share": sum(one.probe_tokens for one in answers) / tokens,
        **{name: seen[name] for name in names},
        "p50_s": percentile([one.seconds for one in answers], 0.5),
        "p99_s": percentile([one.seconds for one in answers], 0.99),
        "problems_per_s": len(answers) / seconds,
        "seconds": seconds,
    }


async def page_bytes(args: argparse.Namespace) -> int:
    """Of a page in the model's own dtype, so that every arm gets the same bytes."""
    engine = await AsyncEngine.start(replace(config_of(args, "none", 64 << 20), max_num_seqs=1))
    try:
        return engine.model.page_bytes
    finally:
        await engine.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms one after the other, print and keep their rows."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    size = args.pool_tokens // EngineConfig().page_size * asyncio.run(page_bytes(args))
    reference: list[Answered] | None = None
    for arm in args.arms:
        print(arm, file=sys.stderr, flush=True)
        started = time.perf_counter()
        answers, seen = asyncio.run(measure(arm, args, size))
        reference = reference or answers
        found = metrics(answers, seen, reference, time.perf_counter() - started)
        versions = {"model": "pebble", "suite": args.suite, "samples": str(args.samples)}
        device = pick_device(args.device).type
        row = rows.make_row("stack", arm, found, seed=args.seed, device=device, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{arm:8} {shown}", flush=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench stack", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="the first one is the reference")
    parser.add_argument("--suite", choices=list(SUITES), default="long")
    parser.add_argument("-n", type=int, default=32, help="problems (default: 32)")
    parser.add_argument("--offset", type=int, default=OFFSET, help="number of the first problem")
    parser.add_argument("--samples", type=int, default=4, help="of each problem (default: 4)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--clients", type=int, default=16, help="problems at a time (default: 16)")
    parser.add_argument("--slots", type=int, default=64, help="sequences that may run at once (default: 64)")
    parser.add_argument("--pool-tokens", type=int, default=65_536, help="of KV in the model's own dtype")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    for name in ("n", "clients", "slots", "pool_tokens", "threads"):
        if getattr(args, name) < 1:
            raise ParameterError(name, "must be at least 1")
    if args.samples < 2:
        raise ParameterError("samples", "a majority needs at least 2")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThinkfoldError as error:
        sys.exit(f"thinkfold bench stack: {error}")
