"""What does a fold cost a step: choosing and judging (prepare), and writing the summary (commit)?

Memory, tables and kept queries of one model's shape are filled with random numbers; no model runs. `host_ms` is what a
call takes of the host, `device_ms` the time between two events around it that the device meets when all is launched.
Both are medians. The floor is one reading of the span's keys and values over the copy bandwidth of the same run.
`--backend reference` folds by PyTorch's operations where kernels are the default.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thinkfold.cli import bench, rows
from thinkfold.errors import ParameterError
from thinkfold.fold import gate
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.kv.summary import SummaryGrowth
from thinkfold.runner.attention_facts import AttentionFacts
from thinkfold.runner.folder import Folder
from thinkfold.runner.loader import pick_attention
from thinkfold.runner.query_store import QueryStore
from thinkfold.runner.shard import WHOLE, OwnHeads
from thinkfold.runner.storage import KVStorage
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.scheduler.output import BatchRow, FoldCommit, FoldPrepare

decode: Any = bench.load(Path(__file__).with_name("decode.py"))  # which measures a copy
CASES = ("512to32/28x4x7x128", "1024to64/28x4x7x128", "1024to64/36x8x4x128", "4096to64/36x8x4x128")
DELAY = 256  # tokens after the span, as in profile `default`
PAST = 4096  # tokens before it
PAUSE = 20_000_000  # cycles of the device, some 10 ms, in which the host launches


@dataclass(frozen=True, slots=True)
class Shape:
    """A fold of `tokens` to `entries` a head; heads are `group` query heads on each KV head."""

    tokens: int
    entries: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Of `1024to64/28x4x7x128`. Raises ParameterError."""
        try:
            tokens, entries, *model = (int(part) for part in text.replace("to", "x").replace("/", "x").split("x"))
            return cls(tokens, entries, *model)
        except (TypeError, ValueError) as error:
            raise ParameterError("case", f"must be like {CASES[0]}, got {text!r:.60}") from error


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a filled memory."""

    folder: Folder
    prepare: FoldPrepare
    now: int
    commit: FoldCommit

    @classmethod
    def of(cls, shape: Shape, page_size: int, selector: str, device: torch.device, backend: str = "auto") -> Slot:
        heads, dtype = shape.layers * shape.kv_heads, dtype_on(device)
        span = shape.tokens // page_size
        blocks = -(-shape.entries // page_size)
        pages = span + 1 + blocks
        storage = KVStorage(
            pages, shape.layers, shape.kv_heads, page_size, shape.head_dim, dtype, device, bias=device.type == "cuda"
        )
        for page in storage.tensor:
            page.copy_(torch.randn(page.shape, device=device))
        tables = SummaryTables(1, shape.layers, shape.kv_heads, page_size, blocks, device)
        tables.reserve()
        queries = QueryStore(1, shape.layers, shape.kv_heads * shape.group, shape.head_dim, dtype, device)
        now = PAST + shape.tokens + DELAY
        _, lines = queries.place([BatchRow(0, [0] * now, False, 0, 0, [], keep_queries=True)])
        kept = torch.randn(shape.layers, len(lines), shape.kv_heads * shape.group, shape.head_dim, device=device)
        queries.keep(torch.tensor(lines, device=device), kept.to(dtype), kept[..., 0].float().abs() + 9.0)
        inv_freq = 1e6 ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        windowed = torch.zeros(shape.layers, dtype=torch.bool, device=device)
        facts = AttentionFacts(shape.head_dim**-0.5, windowed, inv_freq, window=0)
        order = torch.randperm(span).tolist()
        prepare = FoldPrepare(0, 0, order, PAST + shape.tokens, (shape.tokens,), selector, shape.entries)
        first = (span + 1) * heads
        mine = [[first + head * blocks + i for i in range(blocks)] for head in range(heads)]
        growth = SummaryGrowth([shape.entries] * heads, [0] * heads, mine)
        own = OwnHeads(WHOLE, shape.layers, shape.kv_heads, heads)
        budgets = FoldBudgets(shape.layers, shape.kv_heads)
        folder = Folder(storage, tables, queries, budgets, facts, own, pick_attention(backend, device))
        return cls(folder, prepare, now, FoldCommit(0, 0, order, growth))

    def judge(self) -> torch.Tensor:
        """Prepare the fold; its error, 0-d."""
        return gate.error_of(self.folder.prepare(self.prepare, self.now))


def dtype_on(device: torch.device) -> torch.dtype:
    """What memory and queries are kept in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds on the device (of the host, where that is the device) and of the host until the call came back."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        took = time.perf_counter() - started
        return took, took
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE)
    begin.record()
    started = time.perf_counter()
    call()
    host = time.perf_counter() - started
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000, host


def measure(filled: Slot, device: torch.device, runs: int) -> dict[str, float]:
    """Medians of both halves of a fold, in ms, over `runs` folds after three."""
    times: dict[str, list[tuple[float, float]]] = {"prepare": [], "commit": []}
    with torch.no_grad():
        for _ in range(runs + 3):
            times["prepare"].append(timed(filled.judge, device))
            times["commit"].append(timed(lambda: filled.folder.commit(filled.commit), device))
    return {
        f"{half}_{what}_ms": median(pair[i] for pair in pairs[3:]) * 1000
        for half, pairs in times.items()
        for i, what in enumerate(("device", "host"))
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case; print and keep its row."""
    parser = argparse.ArgumentParser(prog="thinkfold bench fold_step", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", help=f"tokens, entries, layers x KV heads x group x dim: {CASES[0]}")
    parser.add_argument("--selector", default="conclusion_attention")
    parser.add_argument("--backend", default="auto", choices=("auto", "reference", "triton"))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    bandwidth = decode.copy_bandwidth(device)
    for case in args.case or CASES:
        shape = Shape.parse(case)
        filled = Slot.of(shape, args.page_size, args.selector, device, args.backend)
        span = 2 * shape.tokens * shape.layers * shape.kv_heads * shape.head_dim * dtype_on(device).itemsize
        metrics = {**measure(filled, device, args.runs), "floor_ms": span / bandwidth * 1000}
        name = case if args.backend == "auto" else f"{case}/{args.backend}"
        versions = {"triton": version("triton")} if device.type == "cuda" else {}
        row = rows.make_row("fold_step", name, metrics, seed=0, device=device.type, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        print(json.dumps(row) if args.json else f"{name}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
