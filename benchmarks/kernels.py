"""How much of a GPU's copy bandwidth does the attention kernel reach when it decodes?

One layer's call, the store of the new tokens with it, of a 7B shape (4 KV heads, 28 query heads of 128) on shuffled
pages; with `int4` all entries but those of the newest page are summaries in 4 bits. A CUDA graph goes through layers
whose keys and values are several times as large as the L2 cache, so that all come from memory. `share_of_copy` is bytes
of keys and values read in a second over those that a copy of the same process reads and writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8
from thinkfold.attention.int4 import blocks_of, pack, page_blocks
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
    table = torch.randperm(pages, generator=gen, device="cuda").int().view(batch, -1)
    lens = torch.full((batch,), entries, dtype=torch.int32, device="cuda")
    summaries = (
        torch.zeros(layers, 0, KV_HEADS, 0, dtype=torch.int32, device="cuda"),
        lens.new_zeros(layers, 0, KV_HEADS),
    )
    call = Call(kv, scales, table, lens, lens.new_full((batch,), -1).long(), *summaries)
    return replayed(call, "triton", gen), batch * entries * token_bytes


class Call(NamedTuple):
    """Memory and tables of one decode step; every row writes the last entry of its last page."""

    kv: Tensor
    scales: Tensor
    page_table: Tensor
    kv_lens: Tensor
    summary_rows: Tensor
    summary_table: Tensor
    summary_lens: Tensor

    def arguments(self, q: Tensor) -> tuple[Any, ...]:
        """What the op takes behind its layer."""
        size, layers, device = self.kv.shape[4], self.kv.shape[1], q.device
        cu = torch.arange(len(q) + 1, dtype=torch.int32, device=device)
        slots = self.page_table[:, -1].long() * size + size - 1
        sinks = slots[:0], q.new_zeros(layers, 0, *q.shape[1:]), torch.zeros(layers, 0, q.shape[1], device=device)
        tables = (cu, self.kv_lens, self.page_table, slots, self.summary_rows, self.summary_table, self.summary_lens)
        return *tables, torch.zeros(0, device=device), self.scales, q.shape[2] ** -0.5, 0, *sinks


def int4_call(batch: int, entries: int, layers: int, size: int, gen: torch.Generator) -> tuple[Call, int]:
    """A step of rows with one raw page each and `entries` in shuffled int4 blocks, and bytes of a layer's blocks."""
    device, per_page = gen.device, page_blocks(layers, KV_HEADS, size, HEAD_DIM, torch.bfloat16)
    number = batch * (entries // size) * layers * KV_HEADS
    pages = -(-number // per_page)
    kv = torch.zeros(batch + pages, layers, KV_HEADS, 2, size, HEAD_DIM, dtype=torch.bfloat16, device=device)
    keys, values = torch.randn(2, 1, size, HEAD_DIM, generator=gen, device=device)
    blocks = blocks_of(kv)
    blocks[batch:] = pack(keys, values, torch.zeros(1, size, device=device))[0]
    shuffled = torch.randperm(number, generator=gen, device=device) + batch * per_page
    table = shuffled.view(batch, layers, KV_HEADS, -1).transpose(0, 1).contiguous().int()
    rows_ = torch.arange(batch, device=device)
    lens = torch.full((layers, batch, KV_HEADS), entries, dtype=torch.int32, device=device)
    raw = torch.full((batch,), size, dtype=torch.int32, device=device)
    scales = torch.zeros(0, dtype=torch.float16, device=device)
    return Call(kv, scales, rows_.int().unsqueeze(1), raw, rows_, table, lens), number // layers * blocks.shape[2]


def decode_int4(batch: int, entries: int, page_size: int, seed: int) -> tuple[float, int]:
    """As `decode`, of summaries in 4 bits."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    layers = max(2, -(-3 * WORKING_SET // (batch * entries * KV_HEADS * 4 * HEAD_DIM)))
    call, read = int4_call(batch, entries, layers, page_size, gen)
    return replayed(call, "triton_int4", gen), read


def replayed(call: Call, backend: str, gen: torch.Generator) -> float:
    """Seconds of one layer's call in a graph of all."""
    batch, layers = len(call.kv_lens), call.kv.shape[1]
    q, k, v = (
        torch.randn(batch, n, HEAD_DIM, generator=gen, device="cuda").bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)
    )

    more = call.arguments(q)

    def step() -> None:
        for layer in range(layers):
            paged_attention(q, k, v, call.kv, layer, *more, backend=backend)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds(graph.replay) / layers


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
    for name in (*DTYPES, "int4"):
        for batch, thousands in SHAPES:
            shape = batch, thousands * 1024
            if name == "int4":
                time_s, read = decode_int4(*shape, args.page_size, args.seed)
            else:
                time_s, read = decode(*shape, DTYPES[name], args.page_size, args.seed)
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
