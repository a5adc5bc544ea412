"""Chosen entries of all heads into their summary blocks in one Triton launch; the twin of `Folder._write`."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.runner.triton_fold_span import key_places


@triton.jit(
    do_not_specialize=["slot", "width", "num_slots", "room", "num_heads", "with_bias"],
    do_not_specialize_on_alignment=["counts", "starts", "pages"],
)
def write(
    kv,
    kv_scales,
    bias,
    pages,
    indices,
    counts,
    starts,
    table,
    slot,
    width,
    num_slots,
    room,
    num_heads,
    with_bias,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (h, i): tile i of the `counts[h]` entries that `indices` `[heads, width]` name of a span's raw `pages`.

    They go behind the `starts[h]` entries of head h of a slot, to blocks of `table` `[layers, num_slots, HEADS, room]`.
    """
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = entry < tl.load(counts + head)
    token = tl.load(indices + head * width + entry, mask=there, other=0).to(tl.int32)
    source = key_places(pages, token, there, head, num_heads, PAGE_SIZE)
    number = tl.load(starts + head) + entry
    line = ((head // HEADS * num_slots + slot) * HEADS + head % HEADS) * room
    block = tl.load(table + line + number // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    place = number % PAGE_SIZE
    target = block * (2 * PAGE_SIZE) + place
    dims = tl.arange(0, LANES)
    shown = there[:, None] & (dims[None, :] < HEAD_DIM)
    for part in range(2):
        rows = tl.load(kv + (source + part * PAGE_SIZE)[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0)
        tl.store(kv + (target + part * PAGE_SIZE)[:, None] * HEAD_DIM + dims[None, :], rows, mask=shown)
        if FP8:
            scales = tl.load(kv_scales + source + part * PAGE_SIZE, mask=there, other=0.0)
            tl.store(kv_scales + target + part * PAGE_SIZE, scales, mask=there)
    tl.store(bias + block * PAGE_SIZE + place, 0.0, mask=there & (with_bias > 0))
