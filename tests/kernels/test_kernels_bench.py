"""The inputs of `bench kernels` in 4 bits, on a CPU: what is timed on a GPU is attention over all entries."""

from __future__ import annotations

from pathlib import Path

import torch

from thinkfold.attention.int4 import Layout, blocks_of, unpack
from thinkfold.attention.ops import paged_attention
from thinkfold.cli import bench

kernels = bench.load(Path(__file__).parents[2] / "benchmarks" / "kernels.py")


def test_int4_rows_attend_to_every_entry() -> None:
    gen = torch.Generator().manual_seed(0)
    call, read = kernels.int4_call(3, 64, 2, 16, gen)
    layout = Layout(16, kernels.HEAD_DIM)
    assert read == 3 * 4 * kernels.KV_HEADS * layout.block_bytes
    assert len(call.summary_table.unique()) == call.summary_table.numel() == 3 * 4 * 2 * kernels.KV_HEADS
    q, k, v = (torch.randn(3, n, kernels.HEAD_DIM, generator=gen).bfloat16() for n in (kernels.HEADS, 4, 4))
    out, _ = paged_attention(q, k, v, call.kv, 1, *call.arguments(q), backend="reference_int4")
    keys, values, _ = unpack(blocks_of(call.kv)[-1, :1], layout, torch.float32)
    keys, values = (torch.cat([rows[0].repeat(4, 1), rows.new_zeros(15, 128)]) for rows in (keys, values))
    for row in range(3):
        for head in (0, 27):
            mine = k[row, head // 7].float(), v[row, head // 7].float()
            scores = torch.cat([keys, mine[0][None]]) @ q[row, head].float() * kernels.HEAD_DIM**-0.5
            expected = scores.softmax(0) @ torch.cat([values, mine[1][None]])
            torch.testing.assert_close(out[row, head].float(), expected, atol=2e-2, rtol=2e-2)
