"""Keys and values by the number of their row in KV memory, whatever dtype it stores."""

from __future__ import annotations

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8, dequantise, quantise


def store(kv: Tensor, kv_scales: Tensor, first: int, index: Tensor, rows: Tensor) -> None:
    """Write `rows` `[n, D]` to entries `first + index` of kv seen as `[-1, D]`."""
    entries = kv.view(-1, kv.shape[5])
    if kv.dtype == FP8:
        rows, scales = quantise(rows)
        kv_scales.view(-1)[first:].index_copy_(0, index, scales)
        entries, rows = entries.view(torch.uint8), rows.view(torch.uint8)  # float8 has no index operations
    entries[first:].index_copy_(0, index, rows)


def load(kv: Tensor, kv_scales: Tensor, first: int, index: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, page_size, D]` in `dtype`: blocks `first + index` of kv seen as `[-1, page_size * D]`."""
    page_size, head_dim = kv.shape[4], kv.shape[5]
    blocks = kv.view(-1, page_size * head_dim)
    if kv.dtype != FP8:
        return blocks[first:].index_select(0, index).view(-1, page_size, head_dim)
    codes = blocks.view(torch.uint8)[first:].index_select(0, index).view(FP8).view(-1, page_size, head_dim)
    return dequantise(codes, kv_scales.view(-1, page_size)[first:].index_select(0, index), dtype)


def load_entries(kv: Tensor, kv_scales: Tensor, first: int, index: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, D]` in `dtype`: entries `first + index` of kv seen as `[-1, D]`."""
    entries = kv.view(-1, kv.shape[5])
    if kv.dtype != FP8:
        return entries[first:].index_select(0, index)
    codes = entries.view(torch.uint8)[first:].index_select(0, index).view(FP8)
    return dequantise(codes, kv_scales.view(-1)[first:].index_select(0, index), dtype)
