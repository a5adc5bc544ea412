"""Paged attention in plain PyTorch: the body for CPUs and the oracle of every kernel.

It reads lengths on the host, so on a GPU it waits for the device: correct there, not fast.
It knows nothing of requests or of the step that calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinkfold.attention.gather_plan import Gather, GatherPlan, additive_mask, first_entry, padded, plan_for

# BLAS adds the products of a row in another order when a product has fewer rows than this.
MIN_ROWS = 4
QUERY_BLOCK = 256


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    layer: int,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    sliding_window: int,
    query_sink_rows: Tensor,
    query_sink: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write, then attend; see `thinkfold.attention.ops.paged_attention` for shapes and meaning.

    Sums run in fp32, or in fp64 for fp64 inputs. A query's result does not depend on the other
    rows of the batch nor on how its prompt was cut into chunks (bit-equal in fp32 on a CPU):
    the online softmax visits chunks of 512 entries from entry 0, and padding adds exact zeros.
    """
    plan = plan_for(kv, cu_seqlens_q, kv_lens, page_table, slot_mapping, sliding_window)
    _write(k, v, kv, layer, plan)
    if query_sink_rows.numel():
        query_sink[layer] = q.index_select(0, query_sink_rows)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for gather in plan.prefill:
        _prefill(q, kv, layer, gather, scale, sliding_window, out, lse)
    for gather in plan.decode:
        _decode(q, kv, layer, gather, scale, out, lse)
    return out, lse


def _write(k: Tensor, v: Tensor, kv: Tensor, layer: int, plan: GatherPlan) -> None:
    _, _, num_heads, _, page_size, head_dim = kv.shape
    if plan.written is not None:
        k, v = k.index_select(0, plan.written), v.index_select(0, plan.written)
    rows = kv.view(-1, head_dim)
    index = plan.writes + layer * (num_heads * 2 * page_size)
    rows.index_copy_(0, index[0], k.reshape(-1, head_dim))
    rows.index_copy_(0, index[1], v.reshape(-1, head_dim))


def _read(kv: Tensor, layer: int, gather: Gather) -> Tensor:
    """Keys and values `[2, n, Hkv, length, D]`, zero at stale entries.

    A page may hold another request's leftovers behind a row's end: NaN times a zero weight is NaN.
    """
    _, _, num_heads, _, page_size, head_dim = kv.shape
    blocks = (gather.blocks + layer * (2 * num_heads)).view(-1)
    gathered = kv.view(-1, page_size * head_dim).index_select(0, blocks)
    if gather.stale.numel():
        gathered.view(2, -1, head_dim).index_fill_(1, gather.stale, 0)
    return gathered.view(2, len(gather.rows), num_heads, gather.length, head_dim)


def _decode(q: Tensor, kv: Tensor, layer: int, gather: Gather, scale: float, out: Tensor, lse: Tensor) -> None:
    """Rows of one token: the query heads of a KV head are the rows of one product."""
    n, num_heads, head_dim = len(gather.rows), kv.shape[2], kv.shape[5]
    group = q.shape[1] // num_heads
    keys, values = _read(kv, layer, gather)
    tokens = gather.tokens
    queries = q.index_select(0, tokens).view(n, num_heads, group, head_dim)
    if group % MIN_ROWS:
        queries = torch.nn.functional.pad(queries, (0, 0, 0, -group % MIN_ROWS))
    o, row_lse = _attend(queries, keys, values, gather.mask, scale)
    out.index_copy_(0, tokens, o[:, :, :group].reshape(n, -1, head_dim))
    lse.index_copy_(0, tokens, row_lse[:, :, :group].reshape(n, -1).float())


def _prefill(
    q: Tensor, kv: Tensor, layer: int, gather: Gather, scale: float, window: int, out: Tensor, lse: Tensor
) -> None:
    """One row of several tokens: its context is gathered once, its queries go in blocks."""
    row = gather.rows[0]
    num_heads, page_size, head_dim = kv.shape[2], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_heads
    start = row.kv_len - row.q_len  # stored entries before the first query
    context = _read(kv, layer, gather)[:, 0, :, None].expand(-1, -1, group, -1, -1)
    for lo in range(0, row.q_len, QUERY_BLOCK):
        n = min(QUERY_BLOCK, row.q_len - lo)
        first = first_entry(start + lo, window)
        length = padded(start + lo + n - first, page_size)
        index = torch.arange(start + lo, start + lo + n + -n % MIN_ROWS, device=q.device)[:, None]
        entries = torch.arange(first, first + length, device=q.device)[None, :]
        visible = entries <= index
        if window > 0:
            visible &= entries > index - window
        tokens = slice(row.start + lo, row.start + lo + n)
        queries = q[tokens].view(n, num_heads, group, head_dim).permute(1, 2, 0, 3)
        if n % MIN_ROWS:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, -n % MIN_ROWS))
        keys, values = context[:, :, :, first - row.first : first - row.first + length]
        o, row_lse = _attend(queries, keys, values, additive_mask(visible, q.dtype)[None, None], scale)
        out[tokens] = o[:, :, :n].permute(2, 0, 1, 3).reshape(n, -1, head_dim)
        lse[tokens] = row_lse[:, :, :n].permute(2, 0, 1).reshape(n, -1).float()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[B, H, M, D]` over `k`, `v` `[B, H, S, D]` with an additive mask.

    Returns out `[B, H, M, D]` and natural-log LSE `[B, H, M]`.
    """
    if q.device.type == "cpu":
        # Online softmax over chunks of 512 keys, in fp32 (fp64 for fp64), without storing scores.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale + mask.to(wide)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.matmul(weights, v.to(wide)).to(q.dtype), lse
