"""How many sessions does a KV pool carry, and at what wait, by admission and fold policy? On a simulated clock.

The real scheduler, admission and memory without a device (see `thinkfold.scheduler.simulation`). The pool holds three
requests of mean length. `overload/…` and `overload-32k/…` send 10,000 requests at three times (`--rate`) the rate that
unfolded KV could serve and show that nothing is lost and how long the waits are: of some 330 tokens, and of 32,000 on
average in units of 64 (a simulated token, page and step stand for 64 tokens, a page of 64 and 64 steps), so that a run
takes minutes. The others run a closed loop. Seconds are the step-time model's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from thinkfold.cli import rows
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Outcome, Simulation, StepTime, Window
from thinkfold.scheduler.workload import THINKERS_32K, Load
from thinkfold.types import FOLD_PROFILES, FoldMode, FoldPolicy, FoldProfile

HEADS = 8


LOADS = {
    "pebble": Load(120, (3000, 4671, 8400), 30, (150, 400), 16, FOLD_PROFILES["pebble"], 16384),
    "7b-32k": Load(2000, (8000, 24000, 64000), 500, (512, 1024), 16, FOLD_PROFILES["default"], 65536),
}
OVERLOADS = {
    "overload": Load(12, (190, 290, 525), 6, (10, 25), 4, FoldProfile(32, 8, 4, 8, 4), 1024),
    "overload-32k": THINKERS_32K,
}
ARMS: dict[str, tuple[FoldMode, Literal["fold", "queue"], bool]] = {  # policy, prefer, predicted admission
    "off": (FoldMode.OFF, "fold", True),
    "off_greedy": (FoldMode.OFF, "fold", False),
    "pressure": (FoldMode.PRESSURE, "fold", True),
    "pressure_queue": (FoldMode.PRESSURE, "queue", True),
    "pressure_greedy": (FoldMode.PRESSURE, "fold", False),
    "eager": (FoldMode.EAGER, "fold", True),
    "eager_greedy": (FoldMode.EAGER, "fold", False),
}


def make_scheduler(load: Load, *, predicted: bool, slots: int) -> Scheduler:
    """A pool of three requests of mean length, with a reserve for one summary."""
    pages = 3 * load.mean // load.page_size
    reserve = -(-load.numbers.entries // load.page_size)
    kv = KVManager(pages, load.page_size, enable_prefix_caching=False, num_heads=HEADS, reserve_pages=reserve)
    admission = Admission(kv.capacity * load.page_size, load.page_size) if predicted else None
    return Scheduler(
        kv,
        max_num_seqs=slots,
        max_num_batched_tokens=2048,
        fold_counts=lambda entries, tokens: [min(entries, tokens)] * HEADS,
        admission=admission,
    )


def simulate(load: Load, arm: str, args: argparse.Namespace) -> Outcome:
    """A closed loop that always has someone waiting; ramp and tail do not count."""
    mode, prefer, predicted = ARMS[arm]
    scheduler = make_scheduler(load, predicted=predicted, slots=args.slots)
    return Simulation(
        scheduler,
        load.work(args.seed),
        fold=FoldPolicy(mode, entries=load.numbers.entries, prefer=prefer),
        numbers=load.numbers,
        budget=load.budget,
        clients=args.slots + 8,
        max_tokens=scheduler.kv.capacity * load.page_size - load.prompt,
        window=Window(args.ramp, args.completions),
    ).run()


def overload(load: Load, arm: str, args: argparse.Namespace) -> Outcome:
    """Requests arrive at `rate` times the rate at which unfolded KV of the pool could be served."""
    mode, prefer, predicted = ARMS[arm]
    scheduler = make_scheduler(load, predicted=predicted, slots=32)
    step_time = StepTime().scaled(load.unit)
    gap = (load.mean - load.prompt) * step_time.seconds(3, 3 * load.mean) / 3 / args.rate
    work = (replace(item, arrival=i * gap) for i, item in zip(range(args.requests), load.work(args.seed), strict=False))
    return Simulation(
        scheduler,
        work,
        fold=FoldPolicy(mode, entries=load.numbers.entries, prefer=prefer),
        numbers=load.numbers,
        budget=load.budget,
        max_tokens=min(load.budget, scheduler.kv.capacity * load.page_size - load.prompt),
        step_time=step_time,
    ).run()


def metrics(outcome: Outcome, seconds: float, unit: int) -> dict[str, float]:
    """The numbers of a row; `unit` tokens stand behind each simulated one."""
    names = ("completed", "failed", "steps", "running_mean", "safe_sessions", "folds", "seconds")
    names += ("kv_pool_use_mean", "kv_waste_share", "wait_p50_s", "wait_p99_s", "wait_max_s", "pages_left")
    numbers = {name: getattr(outcome, name) for name in names}
    forced = {f"forced_{rung}": count for rung, count in outcome.forced.items()}
    return (
        numbers
        | forced
        | {"forced_preemptions": outcome.forced_preemptions, "p99_s": outcome.latency_p99_s}
        | {"output_tokens_per_s": outcome.output_tokens_per_s * unit}
        | {"real_seconds": seconds}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print and keep their rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench simulate", description=str(__doc__).partition("\n")[0])
    cases = [f"{load}/{arm}" for load in (*LOADS, *OVERLOADS) for arm in ARMS]
    parser.add_argument("--case", action="append", help="one of the cases; may be repeated (default: all of pebble)")
    parser.add_argument("--completions", type=int, default=200, help="requests of a closed loop that count")
    parser.add_argument("--ramp", type=int, default=40, help="completions before they count")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of an overload case")
    parser.add_argument("--rate", type=float, default=3.0, help="overload: times what unfolded KV could serve")
    parser.add_argument("--slots", type=int, default=64, help="branches that may run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    chosen = args.case or [case for case in cases if case.startswith("pebble/")]
    if unknown := set(chosen) - set(cases):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    for case in chosen:
        name, _, arm = case.partition("/")
        started = time.perf_counter()
        outcome = overload(OVERLOADS[name], arm, args) if name in OVERLOADS else simulate(LOADS[name], arm, args)
        unit = {**LOADS, **OVERLOADS}[name].unit
        numbers = metrics(outcome, time.perf_counter() - started, unit)
        if name in OVERLOADS:
            numbers["rate"] = args.rate
        row = rows.make_row("simulate", case, numbers, seed=args.seed)
        if not args.no_record:
            rows.keep(row)
        print(json.dumps(row) if args.json else shown(row), flush=True)
    return 0


def shown(row: dict[str, Any]) -> str:
    numbers = row["metrics"]
    return (
        f"{row['case']:22} {numbers['running_mean']:6.2f} running, {numbers['forced_preemptions']:4} forced out, "
        f"{numbers['output_tokens_per_s']:8.1f} tokens/s, pool {numbers['kv_pool_use_mean']:.2f}, wait p50 "
        f"{numbers['wait_p50_s']:.0f} p99 {numbers['wait_p99_s']:.0f} max {numbers['wait_max_s']:.0f} s, "
        f"{numbers['completed']} done, {numbers['failed']} failed, {numbers['pages_left']} pages left"
    )


if __name__ == "__main__":
    sys.exit(main())
