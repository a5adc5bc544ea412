"""How much of a GPU's copy bandwidth does the attention kernel reach when it decodes?

One layer's call, the store of the new tokens with it, of a 7B shape (4 KV heads, 28 query heads of 128) on shuffled
pages. A CUDA graph goes through layers whose keys and values are several times as large as the L2 cache, so that all
come from memory. `share_of_copy` is bytes of keys and values read in a second over those that a copy of the same
process reads and writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch

from thinkfold.attention.fp8 import FP8
from thinkfold.attention.ops import paged_attention
from thinkfold.cli import rows
from thinkfold.errors import UnsupportedError

KV_HEADS, HEADS, HEAD_DIM = 4, 28, 128
SHAPES = ((16, 32), (64, 8), (4, 32), (128, 2), (1, 32))  # rows, thousands of entries each
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
# Keys and values that one replay goes through at least.
WORKING_SET = 1 << 30
COPY_BYTES = 2 << 30
REPEATS = 20


def seconds(call: Callable[[], object]) -> float:
    """Mean time of one of `REPEATS` calls on the device, after three for warming up."""
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / REPEATS


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a copy on the device."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def decode(batch: int, entries: int, dtype: torch.dtype, page_size: int, seed: int) -> tuple[float, int]:
    """Seconds of one layer's call, and bytes of keys, values and scales that it must read."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    token_bytes = KV_HEADS * 2 * (HEAD_DIM * dtype.itemsize + (2 if dtype == FP8 else 0))
    layers = max(2, -(-WORKING_SET // (batch * entries * token_bytes)))
    pages = batch * entries // page_size
    shape = (pages, layers, KV_HEADS, 2, page_size, HEAD_DIM)
    kv = torch.empty(shape, dtype=dtype, device="cuda")
    for page in kv.split(1024):
        page.copy_(torch.randn(page.shape, generator=gen, device="cuda", dtype=torch.bfloat16))
    scales = torch.full(shape[:-1] if dtype == FP8 else (0,), 0.5, dtype=torch.float16, device="cuda")
    q, k, v = (
        torch.randn(batch, n, HEAD_DIM, generator=gen, device="cuda").bfloat16() for n in (HEADS, *[KV_HEADS] * 2)
    )
    cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), entries, dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, generator=gen, device="cuda").int().view(batch, -1)
    slots = table[:, -1].long() * page_size + page_size - 1
    lines = torch.full((batch,), -1, dtype=torch.int64, device="cuda")
    summaries = (
        torch.zeros(layers, 0, KV_HEADS, 0, dtype=torch.int32, device="cuda"),
        lens.new_zeros(layers, 0, KV_HEADS),
    )
    sinks = slots[:0], q.new_zeros(layers, 0, HEADS, HEAD_DIM), torch.zeros(layers, 0, HEADS, device="cuda")
    bias = torch.zeros(0, device="cuda")

    def step() -> None:
        for layer in range(layers):
            tables = (cu, lens, table, slots, lines, *summaries, bias, scales)
            paged_attention(q, k, v, kv, layer, *tables, HEAD_DIM**-0.5, 0, *sinks, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds(graph.replay) / layers, batch * entries * token_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the copy, then every shape; print and keep the rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UnsupportedError("device", "bench kernels measures a GPU, and torch sees none")
    copy = copy_bandwidth()
    for name, dtype in DTYPES.items():
        for batch, thousands in SHAPES:
            time_s, read = decode(batch, thousands * 1024, dtype, args.page_size, args.seed)
            metrics = {"time_ms": time_s * 1000, "share_of_copy": read / time_s / copy, "copy_tb_per_s": copy / 1e12}
            case = f"decode/{batch}x{thousands}k/{name}/page{args.page_size}"
            row = rows.make_row(
                "kernels", case, metrics, seed=args.seed, device="cuda", extra_versions={"triton": version("triton")}
            )
            if not args.no_record:
                rows.keep(row)
            shown = f"{case:32} {metrics['time_ms']:8.3f} ms, {metrics['share_of_copy']:.2f} of copy"
            print(json.dumps(row) if args.json else shown, flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
