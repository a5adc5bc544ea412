"""The first kernel of a layer: new keys and values go to their slots, and rows of queries are cut into tiles.

Both are a program a token or tile, so one launch does them; it attends to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of a tile in the table that `store` makes: its row of the batch, its first token of the step, how many tokens it
# has (0: none), and how many raw entries the first of them sees.
TILE_FIELDS = 4

_LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def _first_tile(cu_seqlens_q, row, TILE_TOKENS: tl.constexpr):
    """Tile `row` starts at; it owns at least ceil(its tokens / TILE_TOKENS) tiles from there on."""
    return (tl.load(cu_seqlens_q + row) + row * (TILE_TOKENS - 1)) // TILE_TOKENS


@triton.jit
def _cut(tiles, index, cu_seqlens_q, kv_lens, num_rows, TILE_TOKENS: tl.constexpr):
    """Find the tile's row, the last one that starts at or before it, and what the tile holds of it."""
    # Where no row is longer than a tile, tile i is that of row i, and nothing need be searched.
    guess = tl.minimum(index, num_rows - 1)
    here = _first_tile(cu_seqlens_q, guess, TILE_TOKENS) <= index
    alone = _first_tile(cu_seqlens_q, guess + 1, TILE_TOKENS) > index
    row = tl.where(here, guess, 0)
    behind = tl.where(here, tl.where(alone, guess + 1, num_rows), guess)
    while behind - row > 1:
        middle = (row + behind) // 2
        if _first_tile(cu_seqlens_q, middle, TILE_TOKENS) <= index:
            row = middle
        else:
            behind = middle
    place = (index - _first_tile(cu_seqlens_q, row, TILE_TOKENS)) * TILE_TOKENS
    start = tl.load(cu_seqlens_q + row)
    length = tl.load(cu_seqlens_q + row + 1) - start
    at = tiles + index * 4
    tl.store(at, row)
    tl.store(at + 1, start + place)
    tl.store(at + 2, tl.minimum(tl.maximum(length - place, 0), TILE_TOKENS))
    tl.store(at + 3, tl.load(kv_lens + row) - length + place + 1)


@triton.jit
def _put(rows, entries, shown, kv, kv_scales, lanes, HEAD_DIM: tl.constexpr, FP8: tl.constexpr):
    """Store `rows` `[heads, D]` at entries `[heads]` of kv seen as `[-1, D]`; `fp8.quantise` where kv is fp8."""
    if FP8:
        wide = rows.to(tl.float32)
        # A maximum passes over NaN, a sum does not.
        exact = tl.div_rn(tl.max(tl.abs(wide), 1) + tl.sum(wide * 0.0, 1), tl.full(entries.shape, 448.0, tl.float32))
        nearest = exact.to(tl.float16)
        bits = nearest.to(tl.int16, bitcast=True) + (nearest.to(tl.float32) < exact).to(tl.int16)
        scales = tl.maximum(bits, 1).to(tl.int16).to(tl.float16, bitcast=True)
        tl.store(kv_scales + entries, scales, mask=tl.max(shown.to(tl.int32), 1) > 0)
        divisors = tl.broadcast_to(scales.to(tl.float32)[:, None], wide.shape)
        rows = tl.div_rn(wide, divisors)
    tl.store(kv + entries[:, None] * HEAD_DIM + lanes[None, :], rows.to(kv.dtype.element_ty), mask=shown)


@triton.jit(
    do_not_specialize=["num_tokens", "num_tiles", "num_rows", "layer"],
    do_not_specialize_on_alignment=["slot_mapping", "cu_seqlens_q", "kv_lens"],
)
def store(
    k,
    v,
    kv,
    kv_scales,
    slot_mapping,
    cu_seqlens_q,
    kv_lens,
    tiles,
    k_stride,
    v_stride,
    num_tokens,
    num_tiles,
    num_rows,
    layer,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program i stores token i, where there is one with a slot, and makes tile i, where there is one.

    Strides are those of tokens; a token's heads lie together.
    """
    index = tl.program_id(0)
    if index < num_tiles:
        _cut(tiles, index, cu_seqlens_q, kv_lens, num_rows, TILE_TOKENS)
    slot = tl.load(slot_mapping + index, mask=index < num_tokens, other=-1).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))
        lanes = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
        shown = (heads[:, None] < NUM_HEADS) & (lanes[None, :] < HEAD_DIM)
        source = heads[:, None] * HEAD_DIM + lanes[None, :]
        token = index.to(tl.int64)
        blocks = (slot // PAGE_SIZE * NUM_LAYERS + layer) * NUM_HEADS + heads
        keys = blocks * (2 * PAGE_SIZE) + slot % PAGE_SIZE
        rows = tl.load(k + token * k_stride + source, mask=shown, other=0.0)
        _put(rows, keys, shown, kv, kv_scales, lanes, HEAD_DIM, FP8)
        rows = tl.load(v + token * v_stride + source, mask=shown, other=0.0)
        _put(rows, keys + PAGE_SIZE, shown, kv, kv_scales, lanes, HEAD_DIM, FP8)
