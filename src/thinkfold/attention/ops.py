"""The attention API: one op that stores new keys and values and attends over paged KV.

It checks shapes and calls the body that is named; it knows no model and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from thinkfold.attention import reference
from thinkfold.errors import ParameterError

Body = Callable[..., tuple[Tensor, Tensor]]
BODIES: Mapping[str, Body] = MappingProxyType({"reference": reference.paged_attention})


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
    scale: float,
    sliding_window: int,
    query_sink_rows: Tensor,
    query_sink: Tensor,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Store `k`, `v` of the new tokens, then let `q` attend over the rows' stored entries.

    q `[T, Hq, D]`; k, v `[T, Hkv, D]`; kv `[num_pages, L, Hkv, 2, page_size, D]` (mutated);
    cu_seqlens_q `[B + 1]` int32 token offsets of the rows, tokens past the last are padding;
    kv_lens `[B]` int32 stored entries of a row with this step's; page_table `[B, max_pages]`
    int32; slot_mapping `[T]` int64 `page * page_size + offset`, -1 stores nothing;
    sliding_window 0 means none, else a query sees that many entries with its own;
    query_sink_rows `[S]` int64: tokens whose query is copied to `query_sink[layer]`,
    query_sink `[L, S, Hq, D]` (mutated).

    Query i of a row with n tokens sees entries `[0, kv_len - n + i + 1)` by stored index.
    Returns out `[T, Hq, D]` and natural-log LSE `[T, Hq]` fp32; padding gives 0 and -inf.
    Raises ValueError for shapes that do not fit together.
    """
    tensors = (cu_seqlens_q, kv_lens, page_table, slot_mapping)
    # A compiler sees one opaque op; eager calls skip its dispatcher, which costs more than a short row.
    call = _opaque if torch.compiler.is_compiling() else _checked
    return call(q, k, v, kv, layer, *tensors, scale, sliding_window, query_sink_rows, query_sink, backend)


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
    scale: float,
    sliding_window: int,
    query_sink_rows: Tensor,
    query_sink: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    tensors = (cu_seqlens_q, kv_lens, page_table, slot_mapping)
    _check(q, k, v, kv, layer, *tensors, query_sink_rows, query_sink)
    return body(backend)(q, k, v, kv, layer, *tensors, scale, sliding_window, query_sink_rows, query_sink)


_opaque = torch.library.custom_op("thinkfold::paged_attention", _checked, mutates_args=("kv", "query_sink"))


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
    scale: float,
    sliding_window: int,
    query_sink_rows: Tensor,
    query_sink: Tensor,
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
    query_sink_rows: Tensor,
    query_sink: Tensor,
) -> None:
    if kv.dim() != 6 or kv.shape[3] != 2 or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous [pages, layers, heads, 2, page_size, dim], got {tuple(kv.shape)}")
    _, num_layers, num_heads, _, _, head_dim = kv.shape
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} is outside the {num_layers} layers of kv")
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit {num_heads} KV heads of {head_dim}")
    expected = (q.shape[0], num_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype == kv.dtype:
        raise ValueError(f"q, k, v and kv differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}, {kv.dtype}")
    num_rows = kv_lens.shape[0]
    if cu_seqlens_q.shape != (num_rows + 1,) or page_table.dim() != 2 or page_table.shape[0] != num_rows:
        raise ValueError(
            f"{num_rows} rows need cu_seqlens_q [{num_rows + 1}] and page_table [{num_rows}, pages],"
            f" got {tuple(cu_seqlens_q.shape)} and {tuple(page_table.shape)}"
        )
    if slot_mapping.shape != (q.shape[0],):
        raise ValueError(f"slot_mapping must be [{q.shape[0]}], got {tuple(slot_mapping.shape)}")
    if query_sink_rows.numel() and query_sink.shape != (num_layers, query_sink_rows.shape[0], *q.shape[1:]):
        raise ValueError(f"query_sink {tuple(query_sink.shape)} does not fit {tuple(query_sink_rows.shape)} rows")
