"""Paged attention in plain PyTorch: the body for CPUs and the oracle of every kernel.

It reads lengths on the host, so on a GPU it waits for the device: correct there, not fast.
It knows nothing of requests or of the step that calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinkfold.attention import int4 as four_bits
from thinkfold.attention import memory
from thinkfold.attention.gather_plan import Gather, GatherPlan, Row, plan_for, wrote
from thinkfold.attention.padding import additive_mask, first_entry, padded, row_multiple
from thinkfold.attention.summary_plan import SummaryPiece, summary_plan

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
    summary_rows: Tensor,
    summary_table: Tensor,
    summary_lens: Tensor,
    bias: Tensor,
    kv_scales: Tensor,
    scale: float,
    sliding_window: int,
    query_sink_rows: Tensor,
    query_sink: Tensor,
    lse_sink: Tensor,
    *,
    int4: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write, then attend; see `thinkfold.attention.ops.paged_attention` for shapes and meaning.

    Sums run in fp32, or in fp64 for fp64 inputs. A query's result does not depend on the other
    rows of the batch nor on how its prompt was cut into chunks (bit-equal in fp32 on a CPU):
    the online softmax visits chunks of 512 entries from entry 0, and padding adds exact zeros.
    Summaries (with `int4` in the blocks of `attention.int4`) stand before entry 0, in a length that
    depends on them alone, so the same softmax joins both by log-sum-exp.
    """
    lines: list[int] = summary_rows.tolist() or [-1] * kv_lens.shape[0]
    pieces = _pieces(lines, kv, summary_table, summary_lens, q.dtype) if sliding_window <= 0 else {}
    lines = [line if line in pieces else -1 for line in lines]
    plan = plan_for(q, kv, cu_seqlens_q, kv_lens, page_table, slot_mapping, lines, sliding_window)
    newest = _write(k, v, kv, kv_scales, layer, plan)
    if plan.in_order:
        gather = plan.decode[0]
        out, lse = _decode(q, _read(kv, kv_scales, layer, gather, q.dtype, newest), gather, gather.mask, scale)
    else:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for gather in plan.prefill:
            context = _read(kv, kv_scales, layer, gather, q.dtype)
            _prefill(q, context, gather.rows[0], None, scale, sliding_window, out, lse)
        for gather in plan.decode:
            rows = _decode(q, _read(kv, kv_scales, layer, gather, q.dtype), gather, gather.mask, scale)
            _place(rows, gather, out, lse)
        read = _read_int4 if int4 else _read_folded
        for gather in plan.folded:
            piece = pieces[gather.rows[0].summary][layer]
            context, mask = read(kv, kv_scales, bias, layer, gather, piece, q.dtype)
            if gather.rows[0].q_len == 1:
                _place(_decode(q, context, gather, _joined(mask, gather, context), scale), gather, out, lse)
            else:
                _prefill(q, context, gather.rows[0], mask, scale, 0, out, lse)
    if query_sink_rows.numel():
        _sink(query_sink_rows, q, query_sink[layer])
        _sink(query_sink_rows, lse, lse_sink[layer])
    return out, lse


def _pieces(
    lines: list[int], kv: Tensor, table: Tensor, lengths: Tensor, dtype: torch.dtype
) -> dict[int, list[SummaryPiece | None]]:
    """What the lines that are named and have summaries hold, by layer."""
    if max(lines, default=-1) < 0:
        return {}
    summaries = summary_plan(kv, table, lengths, dtype)
    return {line: found for line in lines if line >= 0 and (found := summaries.pieces(line))}


def _sink(tokens: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the rows `tokens` `[S]` of `source` to `target`, but those of -1."""
    asked = (tokens >= 0).nonzero()[:, 0]
    target.index_copy_(0, asked, source.index_select(0, tokens.index_select(0, asked)))


def _write(k: Tensor, v: Tensor, kv: Tensor, kv_scales: Tensor, layer: int, plan: GatherPlan) -> Tensor | None:
    """Store the keys and values of a step; returns `[2 * n * Hkv, D]` if they would be read as they are."""
    _, _, num_heads, _, page_size, head_dim = kv.shape
    if plan.written is not None:
        k, v = k.index_select(0, plan.written), v.index_select(0, plan.written)
    rows = torch.cat([k, v]).view(-1, head_dim)
    memory.store(kv, kv_scales, layer * (num_heads * 2 * page_size), plan.writes, rows)
    wrote(kv)
    return rows if kv.dtype == rows.dtype else None


def _read(
    kv: Tensor, kv_scales: Tensor, layer: int, gather: Gather, dtype: torch.dtype, newest: Tensor | None = None
) -> Tensor:
    """Keys and values `[2, n, Hkv, length, D]`, zero at stale entries; `newest` `[2 * n * Hkv, D]` if known.

    A page may hold another request's leftovers behind a row's end: NaN times a zero weight is NaN.
    """
    num_heads, page_size, head_dim = kv.shape[2], kv.shape[4], kv.shape[5]
    kept = None if gather.kept is None else gather.kept.get(layer)
    if kept is not None:
        if newest is None:
            newest = memory.load_entries(kv, kv_scales, layer * (2 * num_heads * page_size), gather.newest, dtype)
        kept.view(-1, head_dim).index_copy_(0, gather.places, newest)
        return kept
    gathered = memory.load(kv, kv_scales, layer * (2 * num_heads), gather.blocks.view(-1), dtype)
    if gather.stale.numel():
        gathered.view(2, -1, head_dim).index_fill_(1, gather.stale, 0)
    gathered = gathered.view(2, len(gather.rows), num_heads, gather.length, head_dim)
    if gather.kept is not None:
        gather.kept[layer] = gathered
    return gathered


def _read_folded(
    kv: Tensor,
    kv_scales: Tensor,
    bias: Tensor,
    layer: int,
    gather: Gather,
    piece: SummaryPiece | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """A row's summaries and then its raw entries.

    Returns keys and values `[2, 1, Hkv, S + length, D]`, zero where nothing may be seen, and the
    additive mask `[1, Hkv, 1, S]` of the summaries: β at an entry, -inf where there is none.
    """
    page_size, head_dim = kv.shape[4], kv.shape[5]
    if piece is None:
        return _read_behind(kv, kv_scales, layer, gather, None, 0, dtype), kv.new_zeros(1, kv.shape[2], 1, 0).to(dtype)
    context = _read_behind(kv, kv_scales, layer, gather, piece.blocks, piece.length, dtype)
    if not bias.numel():
        if piece.stale_entries.numel():
            stale = torch.add(piece.stale_entries, piece.stale_heads, alpha=context.shape[3])
            context.view(2, -1, head_dim).index_fill_(1, stale, 0)
        return context, piece.mask
    beta = bias.view(-1, page_size).index_select(0, piece.numbers).view(piece.mask.shape)
    return context, _hide(context[:, :, :, : piece.length], beta, piece.mask)


def _read_int4(
    kv: Tensor,
    kv_scales: Tensor,
    bias: Tensor,
    layer: int,
    gather: Gather,
    piece: SummaryPiece | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As `_read_folded`, of summaries in int4 blocks; there is no plane of β."""
    if piece is None:
        return _read_folded(kv, kv_scales, bias, layer, gather, None, dtype)
    raw = _read_behind(kv, kv_scales, layer, gather, None, piece.length, dtype)
    layout, blocks = four_bits.Layout(kv.shape[4], kv.shape[5]), four_bits.blocks_of(kv)
    found = blocks[piece.numbers // blocks.shape[1], piece.numbers % blocks.shape[1]].view(
        kv.shape[2], -1, blocks.shape[2]
    )
    context = raw.new_empty(*raw.shape[:3], piece.length + raw.shape[3], raw.shape[4])
    context[:, :, :, piece.length :] = raw
    summary = context[:, :, :, : piece.length]
    beta = four_bits.unpack_into(summary[:, 0].unflatten(2, (-1, layout.page_size)), found, layout)
    return context, _hide(summary, beta.reshape(piece.mask.shape), piece.mask)


def _read_behind(
    kv: Tensor, kv_scales: Tensor, layer: int, gather: Gather, ahead: Tensor | None, places: int, dtype: torch.dtype
) -> Tensor:
    """Keys and values `[2, 1, Hkv, n, D]` of the head blocks `ahead` `[2, Hkv, P]` and a row's raw entries.

    `places` are all entries before the raw ones, of which `ahead` may be None.
    """
    _, _, num_heads, _, page_size, head_dim = kv.shape
    row = gather.rows[0]
    total = padded(places + row.kv_len) - places
    blocks = gather.blocks[:, 0, :, : total // page_size] + layer * (2 * num_heads)
    if ahead is not None:
        blocks = torch.cat([ahead, blocks], dim=2)
    context = memory.load(kv, kv_scales, 0, blocks.reshape(-1), dtype).view(2, 1, num_heads, -1, head_dim)
    # Behind its last page the row's own first page is repeated, which has a stale tail if it is the only one.
    stale = total - row.kv_len if row.kv_len < page_size else -row.kv_len % page_size
    first = context.shape[3] - total + row.kv_len
    context[:, :, :, first : first + stale] = 0
    return context


def _hide(rows: Tensor, beta: Tensor, mask: Tensor) -> Tensor:
    """Zero summary `rows` `[2, 1, Hkv, S, D]` that may not be seen; their additive mask `[1, Hkv, 1, S]`."""
    hidden = (mask < 0) | (beta == -torch.inf)
    rows.masked_fill_(hidden.transpose(2, 3), 0)
    return beta.to(rows.dtype).masked_fill_(hidden, -torch.inf)


def _joined(mask: Tensor, gather: Gather, context: Tensor) -> Tensor:
    """The mask `[1, Hkv, 1, S + length]` of a folded row's one token."""
    raw = gather.mask[..., : context.shape[3] - mask.shape[3]]
    return torch.cat([mask, raw.expand(-1, mask.shape[1], -1, -1)], dim=3)


def _decode(q: Tensor, context: Tensor, gather: Gather, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Rows of one token: the query heads of a KV head are the rows of one product.

    Returns out `[n, Hq, D]` and LSE `[n, Hq]`.
    """
    keys, values = context.unbind()
    n, num_heads, _, head_dim = keys.shape
    group = q.shape[1] // num_heads
    queries = q.reshape(-1, head_dim).index_select(0, gather.queries).view(n, num_heads, -1, head_dim)
    o, lse = _attend(queries, keys, values, mask, scale)
    return o[:, :, :group].reshape(n, -1, head_dim), lse[:, :, :group].reshape(n, -1).float()


def _place(rows: tuple[Tensor, Tensor], gather: Gather, out: Tensor, lse: Tensor) -> None:
    out.index_copy_(0, gather.tokens, rows[0])
    lse.index_copy_(0, gather.tokens, rows[1])


def _prefill(
    q: Tensor, context: Tensor, row: Row, summary: Tensor | None, scale: float, window: int, out: Tensor, lse: Tensor
) -> None:
    """One row of several tokens: its context is gathered once, its queries go in blocks."""
    _, _, num_heads, _, head_dim = context.shape
    group, multiple = q.shape[1] // num_heads, row_multiple(head_dim)
    ahead = 0 if summary is None else summary.shape[3]
    start = row.kv_len - row.q_len  # stored entries before the first query
    context = context[:, 0, :, None].expand(-1, -1, group, -1, -1)
    for lo in range(0, row.q_len, QUERY_BLOCK):
        n = min(QUERY_BLOCK, row.q_len - lo)
        first = first_entry(start + lo, window)
        length = padded(ahead + start + lo + n - first)
        index = torch.arange(start + lo, start + lo + n + -n % multiple, device=q.device)[:, None]
        entries = torch.arange(first, first + length - ahead, device=q.device)[None, :]
        hidden = entries > index
        if window > 0:
            hidden |= entries <= index - window
        mask = additive_mask(hidden, q.dtype)[None, None]
        if summary is not None:
            shape = (num_heads, 1, len(index), -1)
            mask = torch.cat([summary.transpose(0, 1).expand(shape), mask.expand(shape)], dim=3)
        tokens = slice(row.start + lo, row.start + lo + n)
        queries = q[tokens].view(n, num_heads, group, head_dim).permute(1, 2, 0, 3)
        if n % multiple:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, -n % multiple))
        keys, values = context[:, :, :, first - row.first : first - row.first + length]
        o, row_lse = _attend(queries, keys, values, mask, scale)
        out[tokens] = o[:, :, :n].permute(2, 0, 1, 3).reshape(n, -1, head_dim)
        lse[tokens] = row_lse[:, :, :n].permute(2, 0, 1).reshape(n, -1).float()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[B, H, M, D]` over `k`, `v` `[B, H, S, D]` with an additive mask.

    Returns out `[B, H, M, D]` and natural-log LSE `[B, H, M]`.
    """
    if q.device.type == "cpu":
        # Online softmax over chunks of 512 keys, in fp32 (fp64 for fp64), without storing scores.
        flash = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[reportPrivateImportUsage]
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale + mask.to(wide)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.matmul(weights, v.to(wide)).to(q.dtype), lse
