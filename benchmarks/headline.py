"""How many long thinkers does one GPU carry, how fast, and what does a step cost when the thinking is long?

The whole core runs on the 7B shape with random weights and forced tokens, because only speed is asked for. `7b-8k`: 32
requests at once of 512 + 8,192 tokens in 3.76 GB of KV. `7b-32k`: a pool of three requests of 2,000 + 32,000 + 500
tokens, started at evenly spread ages, and always somebody waits. `long-128k`: one request of 2,000 + 128,000 + 20,000
tokens at several ages. Segments of the last two have 512 to 2,048 tokens, 1,024 on average.

What a request has written before the clock starts is not computed (see `thinkfold.cli.staged`); after that every step
is a whole one. `--predict` runs the same without any device or weights: a step lasts as long as a formula says.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import torch

from thinkfold import EngineConfig, SamplingParams
from thinkfold.cli import rows
from thinkfold.cli.staged import BREAK, CLOSE, QUIET, WORD, Stage, filled_runner, run_stages, stored_page_bytes
from thinkfold.engine.capacity import reserve_pages
from thinkfold.errors import ParameterError
from thinkfold.runner import loader
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import fold_budgets
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.shapes import SHAPES
from thinkfold.runner.storage import page_bytes
from thinkfold.scheduler.simulation import StepTime, percentile
from thinkfold.types import (
    FOLD_PROFILES,
    EngineRequest,
    FoldMode,
    FoldPolicy,
    Phase,
    PromptState,
    ThinkingPolicy,
)

STEP_TOKENS = 8192  # max_num_batched_tokens, as in vLLM's run
GOLDEN = 0.6180339887498949  # multiples of it spread evenly over 0 to 1, however many there are
STEP_TIME = StepTime(5.2e-3, 2.5e-5, 1.5e-8)  # of the 7B shape on an H200, roughly: for predictions


@dataclass(frozen=True, slots=True)
class Case:
    """Requests in tokens, how their thinking is cut and folded, and the pool: so many tokens, or whole requests."""

    prompt: int
    thinking: int
    answer: int
    profile: str
    segment: tuple[int, int]  # the shortest, which is the likeliest, and the longest
    sessions: int
    first: int = 0  # the shortest first segment: folds of requests that begin together then fall into different steps
    pool_tokens: int = 0
    pool_requests: int = 0
    points: tuple[int, ...] = ()  # output tokens at which a step is looked at

    @property
    def output(self) -> int:
        return self.thinking + self.answer

    def scaled(self, by: int) -> Case:
        """With lengths and the pool divided; segments and folds stay what they are."""
        lengths = {name: getattr(self, name) // by for name in ("prompt", "thinking", "answer", "pool_tokens")}
        return replace(self, **lengths, points=tuple(point // by for point in self.points))

    def request(self, number: int, vocab_size: int, mode: FoldMode, most: int | None = None) -> EngineRequest:
        """With tokens of its own; it ends after `most` output tokens, or by itself."""
        rng = Random(number)
        tokens = [WORD] * self.output
        end = rng.randint(self.first, self.segment[0]) if self.first else self._segment(rng)
        while end < self.thinking:
            tokens[end - 1] = BREAK
            end += self._segment(rng)
        if self.answer:
            tokens[self.thinking - 1] = CLOSE
        prompt = tuple(rng.randrange(CLOSE + 1, vocab_size) for _ in range(self.prompt))
        length = self.output if most is None else min(most, self.output)
        sampling = SamplingParams(
            temperature=0.0, seed=number, ignore_eos=True, max_tokens=length, forced_tokens=tuple(tokens[:length])
        )
        thinking = ThinkingPolicy(True, None, "default", answer_reserve=self.answer)
        fold = FoldPolicy(mode, self.profile, entries=FOLD_PROFILES[self.profile].entries)
        state = PromptState(Phase.THINKING, 0, self.prompt)
        return EngineRequest(str(number), prompt, state, sampling, thinking, fold=fold)

    def _segment(self, rng: Random) -> int:
        low, high = self.segment
        return round(rng.triangular(low, high, low)) if low < high else low


POINTS = (*range(8000, 128001, 8000), 138000, 148000)  # thinking, the middle of the answer, its end
CASES = {
    "7b-8k": Case(512, 8192, 0, "fine", (512, 512), sessions=32, first=128, pool_tokens=65536),
    "7b-32k": Case(2000, 32000, 500, "default", (512, 2048), sessions=32, pool_requests=3),
    "long-128k": Case(2000, 128000, 20000, "default", (512, 2048), sessions=1, pool_requests=1, points=POINTS),
}
ARMS = {
    "7b-8k": ("off_greedy", "off", "eager", "eager/fp8"),
    "7b-32k": ("off", "off_greedy", "eager", "off/ample", "eager/ample"),
    "long-128k": ("off", "eager"),
}
AMPLE_SESSIONS = 18  # where memory is ample, the batch is as large as was asked of folding


class Arm(NamedTuple):
    """`off`, `off_greedy` (fill and preempt), `pressure` or `eager`, each also with fp8 KV or ample memory."""

    mode: FoldMode
    greedy: bool
    fp8: bool
    ample: bool

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Raises ParameterError."""
        name, *marks = text.split("/")
        if name not in ("off", "off_greedy", "pressure", "eager") or not set(marks) <= {"fp8", "ample"}:
            known = "off, off_greedy, pressure or eager, each also with /fp8 and /ample"
            raise ParameterError("arm", f"must be {known}, got {text!r:.60}")
        return cls(FoldMode(name.removesuffix("_greedy")), name.endswith("_greedy"), "fp8" in marks, "ample" in marks)


def stages_of(args: argparse.Namespace, name: str, case: Case, arm: Arm, vocab_size: int) -> list[Stage]:
    """A warm-up with a fold and a step full of prompts, then what is measured."""

    def request(number: int, most: int | None = None) -> EngineRequest:
        return case.request(number, vocab_size, arm.mode, most)

    numbers = FOLD_PROFILES[case.profile]
    length = numbers.max_segment_tokens
    due = length + numbers.fold_delay
    folding = replace(case, segment=(length, length), first=0).request(-1, vocab_size, arm.mode, due + QUIET)
    prompts = [request(-2 - i, 8) for i in range(max(1, min(case.sessions, STEP_TOKENS // case.prompt)))]
    stages = [Stage([(folding, due - QUIET - 8)], iter(())), Stage([], iter(prompts), len(prompts))]
    if due + QUIET > case.output:
        del stages[0]
    if name == "7b-8k":
        return [*stages, Stage([], map(request, range(case.sessions)), case.sessions, args.seconds or inf)]
    if name == "7b-32k":
        last = case.output - 2 * QUIET
        aged = [(request(i), 1 + int(i * GOLDEN % 1.0 * last)) for i in range(case.sessions)]
        fresh: Iterator[EngineRequest] = map(request, range(case.sessions, sys.maxsize))
        return [*stages, Stage(aged, fresh, 2, args.seconds or 60.0)]
    for number, point in enumerate(case.points):
        first = max(QUIET + 1, point - args.steps // 2)
        stages.append(Stage([(request(number, first + args.steps), first - QUIET)], iter(())))
    return stages


def config_of(args: argparse.Namespace, base: EngineConfig, case: Case, arm: Arm, loaded: LoadedModel) -> EngineConfig:
    """An engine whose pool is as large as the case says, in bytes that are the same for every arm and dtype."""
    config = replace(
        base,
        max_model_len=case.prompt + case.output + 2 * QUIET,
        max_num_seqs=case.sessions,
        admission="greedy" if arm.greedy else "predicted",
        fold_profile=case.profile,
    )
    if case.pool_requests:
        reserve = reserve_pages(fold_budgets(loaded), config, sys.maxsize)
        # A page more than a request fills, since a token too many may be in flight.
        pages = case.pool_requests * (-(-(case.prompt + case.output) // args.page_size) + 1) + reserve
        size = pages * stored_page_bytes(config, loaded)
    else:
        size = case.pool_tokens * page_bytes(loaded.num_layers, loaded.num_kv_heads, 1, loaded.head_dim, loaded.dtype)
    return replace(config, kv_cache_bytes=size, kv_cache_dtype="fp8_e4m3" if arm.fp8 else "model")


def numbers_of(stage: Stage) -> dict[str, float]:
    """What was measured from the moment on when the aged requests had caught up."""
    watch, steps = stage.watch, len(stage.gaps)
    if watch is None or not steps:
        raise SystemExit("no step was measured: the requests are too short for this")
    seconds = sum(stage.gaps)
    return {
        "output_tokens_per_s": stage.tokens / seconds,
        "wall_s": seconds,
        "steps": steps,
        "step_ms": seconds / steps * 1000,
        "step_p50_ms": median(stage.gaps) * 1000,
        "step_p99_ms": percentile(stage.gaps, 0.99) * 1000,
        "host_ms": stage.host_s / steps * 1000,
        "safe_sessions": watch.safe_sessions,
        "running_mean": watch.running_mean,
        "forced_preemptions": stage.forced,
        "kv_pool_use_mean": watch.kv_pool_use_mean,
        "kv_unused_share": watch.kv_unused_share,
        "folds": stage.folds,
        "entries_mean": fmean(stage.held),  # of all running requests
        "entries_peak": stage.peak,  # of one
        "output_tokens": stage.tokens,
        "completed": stage.completed,
    }


def base_config(args: argparse.Namespace, folder: str) -> EngineConfig:
    """What all arms share. Writes the configuration of `7b` to `folder`, with positions for the longest case."""
    longest = max(case.prompt + case.output for case in CASES.values()) + 4 * QUIET
    (Path(folder) / "config.json").write_text(json.dumps({**SHAPES["7b"], "max_position_embeddings": longest}))
    return EngineConfig(
        model=folder if args.model == "7b" else args.model,
        load_format="dummy" if args.model == "7b" else "auto",
        device=args.device,
        page_size=args.page_size,
        max_num_batched_tokens=STEP_TOKENS,
        enforce_eager=args.enforce_eager,
    )


def runner_for(config: EngineConfig, loaded: LoadedModel, kept: dict[EngineConfig, ModelRunner]) -> ModelRunner:
    """The one that is kept, where another arm has made it: compiling and capturing take long."""
    known = replace(config, admission="predicted", fold_profile=None)  # what no runner looks at
    if known not in kept:
        kept.clear()
        gc.collect()
        torch.cuda.empty_cache()
        kept[known] = filled_runner(known, loaded)
    return kept[known]


def run_arm(
    args: argparse.Namespace,
    base: EngineConfig,
    loaded: LoadedModel,
    kept: dict[EngineConfig, ModelRunner],
    name: str,
    text: str,
) -> None:
    """Run one arm of a case; print its rows and keep them."""
    arm, case = Arm.parse(text), CASES[name].scaled(args.scale)
    if args.sessions or arm.ample:
        case = replace(case, sessions=args.sessions or AMPLE_SESSIONS)
    if arm.ample:
        case = replace(case, pool_requests=case.sessions)
    stages = stages_of(args, name, case, arm, loaded.vocab_size)
    config = config_of(args, base, case, arm, loaded)
    run_stages(config, loaded, stages, STEP_TIME if args.predict else runner_for(config, loaded, kept))
    gc.unfreeze()  # what the core had frozen goes with it, and so may the runner
    measured = stages[-len(case.points) :] if name == "long-128k" else stages[-1:]
    marks = f"/{args.sessions}_sessions" if args.sessions else ""
    marks += f"/page{args.page_size}" if args.page_size != 16 else ""
    marks += f"/scale{args.scale}" if args.scale > 1 else ""
    marks += "/predicted" if args.predict else ""
    device = "cpu" if args.predict else loaded.device.type
    versions = {"model": args.model, "weights": "random" if args.model == "7b" else "its own", "tokens": "forced"}
    versions |= {"triton": version("triton")} if device == "cuda" else {}
    for stage, point in zip(measured, CASES[name].points or (None,), strict=True):
        where = "" if point is None else f"/{point // 1000}k"
        label = f"{name}/{text}{where}{marks}"
        row = rows.make_row("headline", label, numbers_of(stage), seed=0, device=device, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        shown = ", ".join(f"{metric} {value:.4g}" for metric, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{label}: {shown}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model once, run every arm of every case."""
    parser = argparse.ArgumentParser(prog="thinkfold bench headline", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated (default: all)")
    parser.add_argument("--arm", action="append", help="off, off_greedy, pressure or eager, also with /fp8 and /ample")
    parser.add_argument("--seconds", type=float, help="measure no longer than this (default: 60 for 7b-32k)")
    parser.add_argument("--sessions", type=int, help="requests that may run at once (default: 32; 18 with /ample)")
    parser.add_argument("--steps", type=int, default=64, help="steps measured at each age of long-128k")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths, for a small model")
    parser.add_argument("--model", default="7b", help="7b (random weights), or a model that can be loaded")
    parser.add_argument("--predict", action="store_true", help="without device and weights, on a simulated clock")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    if min(args.scale, args.steps, args.sessions or 1) < 1 or (args.seconds or 1.0) <= 0:
        parser.error("scale, steps, sessions and seconds must be positive")
    plan = [(name, arm) for name in args.case or CASES for arm in args.arm or ARMS[name]]
    for _, arm in plan:
        Arm.parse(arm)
    with tempfile.TemporaryDirectory() as folder:
        base = base_config(args, folder)
        loaded = loader.outline(base) if args.predict else loader.load(base)
        kept: dict[EngineConfig, ModelRunner] = {}
        for name, arm in plan:
            run_arm(args, base, loaded, kept, name, arm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
