"""Do answers stay right when finished thinking is folded? Arms on the same questions, paired, against full KV.

An arm is `off`, `pressure` or `eager`, with a selector and entries if they are not the engine's own: `eager/snap/32`.
The first arm is the reference. Give `off` twice for an A/A arm: on a GPU the shape of a batch changes rounding, so two
runs of the same arm differ, and that is the noise floor. Every arm meets the questions in an order of its own, so no
two arms share their batches. Decoding is greedy; questions and orders are fixed by `--offset` and `--seed`.

Several engines in processes of their own share one device (`--processes`), each with its own pool.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

from thinkfold.cli import evaluation, paired, rows
from thinkfold.cli.arms import Arm, Shard, arms, measure
from thinkfold.cli.evaluation import Result
from thinkfold.config import EngineConfig
from thinkfold.errors import ThinkfoldError
from thinkfold.pebble import SUITES

LONG = 8000  # thinking tokens; the design bounds the peak of longer answers apart


def shards(args: argparse.Namespace, asked: Sequence[Arm]) -> list[Shard]:
    """One for each process; the questions of each arm come in an order of its own and are cut for the processes."""
    config = EngineConfig(
        model="pebble",
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=args.concurrency,
        max_waiting=args.n,
        kv_cache_bytes=args.kv_cache_bytes,
        enable_prefix_caching=False,
    )
    orders = []
    for number, _ in enumerate(asked):
        orders.append(list(range(args.offset, args.offset + args.n)))
        Random(args.seed + number).shuffle(orders[-1])
    processes = min(args.processes, args.n)
    cut = (
        [(arm, order[first::processes]) for arm, order in zip(asked, orders, strict=True)] for first in range(processes)
    )
    return [Shard(args.suite, config, questions, args.thinking_token_budget) for questions in cut]


def compare(reference: Sequence[Result], other: Sequence[Result]) -> dict[str, float]:
    """The paired metrics, and the peak of answers that thought for more than `LONG` tokens under the reference."""
    found = paired.compare(reference, other)
    far = [
        o.kv_peak_entries / r.kv_peak_entries
        for r, o in zip(reference, other, strict=True)
        if r.samples and r.samples[0].thinking_tokens > LONG
    ]
    if far:
        found |= {"kv_peak_ratio_long": fmean(far), "n_long": len(far)}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms, print and keep their rows."""
    args = parse(argv)
    asked, reference = arms(args.arms), None
    for arm, results, seconds in measure(shards(args, asked), asked, args.gpus):
        metrics = evaluation.metrics(results, seconds)
        for task, own in evaluation.by_task(results).items():
            metrics[f"accuracy_{task}"] = fmean(result.accuracy for result in own)
        if reference is None:
            reference = results
        else:
            metrics |= compare(reference, results)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            evaluation.write_results(args.out / f"{arm.name.replace('/', '-')}.jsonl", results)
        row = rows.make_row("accuracy", f"{args.suite}/{arm.name}", metrics, seed=args.seed, device=args.device)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(json.dumps(row) if args.json else f"{arm.name:32} {shown}", flush=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench accuracy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", choices=list(SUITES), default="long")
    parser.add_argument("-n", type=int, default=300, help="questions (default: 300)")
    parser.add_argument("--offset", type=int, default=0, help="number of the first question")
    parser.add_argument("--arms", nargs="+", default=["off", "off", "eager"], metavar="ARM")
    parser.add_argument("--processes", type=int, default=1, help="engines side by side (default: 1)")
    parser.add_argument("--gpus", type=int, default=0, help="spread the processes over so many GPUs")
    parser.add_argument("--concurrency", type=int, default=64, help="sequences at a time in each engine (default: 64)")
    parser.add_argument("--kv-cache-bytes", type=int, help="pool of each engine; needed where several share a device")
    parser.add_argument("--thinking-token-budget", type=int, default=-1, help="of an answer (default: no limit)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=0, help="of the arms' orders")
    parser.add_argument("--out", type=Path, help="folder for one JSON line a question and arm")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    for name in ("n", "processes", "concurrency"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThinkfoldError as error:
        sys.exit(f"thinkfold bench accuracy: {error}")
