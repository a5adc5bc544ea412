"""The attention API: one op that stores new keys and values and attends over paged KV.

It checks shapes and calls the body that is named; it knows no model and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, library

from thinkfold.attention import reference
from thinkfold.attention.fp8 import FP8
from thinkfold.attention.padding import LENGTH_ALIGN
from thinkfold.errors import ParameterError

Body = Callable[..., tuple[Tensor, Tensor]]


def _triton(*args: Any, int4: bool = False) -> tuple[Tensor, Tensor]:
    from thinkfold.attention import triton_paged  # Triton is not everywhere, and slow to import

    return triton_paged.paged_attention(*args, int4=int4)


BODIES: Mapping[str, Body] = MappingProxyType(
    {
        "reference": reference.paged_attention,
        "triton": _triton,
        "reference_int4": partial(reference.paged_attention, int4=True),
        "triton_int4": partial(_triton, int4=True),
    }
)


def body(name: str) -> Body:
    """The body called `name`; raises ParameterError for an unknown name."""
    if name not in BODIES:
        raise ParameterError("attention_backend", f"must be one of {', '.join(BODIES)}, got {name!r}")
    return BODIES[name]


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
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Store `k`, `v` of the new tokens, then let `q` attend over the rows' stored entries.

    q `[T, Hq, D]`; k, v `[T, Hkv, D]`; kv `[num_pages, L, Hkv, 2, page_size, D]` (mutated);
    cu_seqlens_q `[B + 1]` int32 token offsets of the rows, tokens past the last are padding;
    kv_lens `[B]` int32 stored entries of a row with this step's; page_table `[B, max_pages]`
    int32; slot_mapping `[T]` int64 `page * page_size + offset`, -1 stores nothing;
    sliding_window 0 means none, else a query sees that many entries with its own;
    query_sink_rows `[S]` int64: tokens whose query is copied to `query_sink[layer]` and whose LSE
    to `lse_sink[layer]`, -1 copies nothing; query_sink `[L, S, Hq, D]`, lse_sink `[L, S, Hq]` fp32 (both mutated).

    Summaries: summary_rows `[B]` int64 is the line of the two tables that a row reads, -1 for
    none, and `[0]` where no row reads one; summary_table `[L, N, Hkv, R]` int32 head blocks, block
    `(page * L + layer) * Hkv + head` being any head's; summary_lens `[L, N, Hkv]` int32 entries in
    them, 0 for none. Both are changed by in-place operations of torch alone. bias
    `[num_pages, L, Hkv, page_size]` fp32 is added to the logits of summary entries (-inf hides
    one), `[0]` where there is no such plane. With a backend whose name ends in `_int4` the table's
    blocks are those of `attention.int4`, which hold their β themselves.

    With a kv of float8_e4m3fn, kv_scales `[num_pages, L, Hkv, 2, page_size]` fp16 (mutated) holds
    one scale a token and head for K and V, else it is `[0]`; q, k, v keep the model's dtype.

    Query i of a row with n tokens sees entries `[0, kv_len - n + i + 1)` by stored index, and all
    summary entries of its row's line, unless the layer has a sliding window.
    Returns out `[T, Hq, D]` and natural-log LSE `[T, Hq]` fp32; padding gives 0 and -inf.
    Raises ValueError for shapes that do not fit together.
    """
    tables = (cu_seqlens_q, kv_lens, page_table, slot_mapping, summary_rows, summary_table, summary_lens)
    sinks = (query_sink_rows, query_sink, lse_sink)
    # A compiler sees one opaque op; eager calls skip its dispatcher, which costs more than a short row.
    call = _opaque if torch.compiler.is_compiling() else _checked
    return call(q, k, v, kv, layer, *tables, bias, kv_scales, scale, sliding_window, *sinks, backend)


def _checked(
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    tables = (cu_seqlens_q, kv_lens, page_table, slot_mapping, summary_rows, summary_table, summary_lens)
    sinks = (query_sink_rows, query_sink, lse_sink)
    _check(q, k, v, kv, layer, *tables, bias, kv_scales, *sinks)
    return body(backend)(q, k, v, kv, layer, *tables, bias, kv_scales, scale, sliding_window, *sinks)


_opaque = library.custom_op(
    "thinkfold::paged_attention", _checked, mutates_args=("kv", "kv_scales", "query_sink", "lse_sink")
)


@_opaque.register_fake
def _fake(
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def _check(
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
    query_sink_rows: Tensor,
    query_sink: Tensor,
    lse_sink: Tensor,
) -> None:
    if kv.dim() != 6 or kv.shape[3] != 2 or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous [pages, layers, heads, 2, page_size, dim], got {tuple(kv.shape)}")
    num_pages, num_layers, num_heads, _, page_size, head_dim = kv.shape
    if page_size > LENGTH_ALIGN or LENGTH_ALIGN % page_size:
        raise ValueError(f"kv has pages of {page_size} entries, which do not divide {LENGTH_ALIGN}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} is outside the {num_layers} layers of kv")
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit {num_heads} KV heads of {head_dim}")
    expected = (q.shape[0], num_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype or kv.dtype not in (q.dtype, FP8):
        raise ValueError(f"q, k, v and kv differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}, {kv.dtype}")
    if kv.dtype == FP8:
        _fits("kv_scales", kv_scales, torch.float16, (num_pages, num_layers, num_heads, 2, page_size))
    elif kv_scales.numel():
        raise ValueError(f"kv_scales {tuple(kv_scales.shape)} belong to a kv of float8_e4m3fn, got {kv.dtype}")
    if bias.numel():
        _fits("bias", bias, torch.float32, (num_pages, num_layers, num_heads, page_size))
    num_rows = kv_lens.shape[0]
    if cu_seqlens_q.shape != (num_rows + 1,) or page_table.dim() != 2 or page_table.shape[0] != num_rows:
        raise ValueError(
            f"{num_rows} rows need cu_seqlens_q [{num_rows + 1}] and page_table [{num_rows}, pages],"
            f" got {tuple(cu_seqlens_q.shape)} and {tuple(page_table.shape)}"
        )
    if slot_mapping.shape != (q.shape[0],):
        raise ValueError(f"slot_mapping must be [{q.shape[0]}], got {tuple(slot_mapping.shape)}")
    if summary_rows.shape not in ((num_rows,), (0,)) or summary_rows.dtype != torch.int64:
        raise ValueError(f"summary_rows must be int64 [{num_rows}], got {tuple(summary_rows.shape)}")
    blocks = summary_table.shape
    if len(blocks) != 4 or (blocks[0], blocks[2]) != (num_layers, num_heads) or summary_table.dtype != torch.int32:
        raise ValueError(f"summary_table must be int32 [{num_layers}, lines, {num_heads}, blocks], got {tuple(blocks)}")
    if summary_lens.shape != blocks[:3] or summary_lens.dtype != torch.int32:
        raise ValueError(f"summary_lens must be int32 {tuple(blocks[:3])}, got {tuple(summary_lens.shape)}")
    if query_sink_rows.numel():
        num_sunk = query_sink_rows.shape[0]
        _fits("query_sink", query_sink, q.dtype, (num_layers, num_sunk, *q.shape[1:]))
        _fits("lse_sink", lse_sink, torch.float32, (num_layers, num_sunk, q.shape[1]))


def _fits(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
