"""What the attention op takes, in its order, as the tests of its bodies make it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Tensors of `thinkfold.attention.ops.paged_attention`; the int arguments stand apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    summary_rows: Tensor
    summary_table: Tensor
    summary_lens: Tensor
    bias: Tensor
    kv_scales: Tensor
