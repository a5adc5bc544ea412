"""The door between transformers' models and our attention op.

A model whose config names the implementation `thinkfold` calls `attend` in every layer. No mask
function is registered under that name, so transformers builds no mask at all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface

from thinkfold.attention.ops import paged_attention
from thinkfold.errors import UnsupportedError
from thinkfold.runner.forward_batch import ForwardBatch

IMPLEMENTATION = "thinkfold"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    forward_batch: ForwardBatch | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of one layer over paged KV; query `[1, Hq, T, D]`, key and value `[1, Hkv, T, D]`.

    Returns `[1, T, Hq, D]`. Raises UnsupportedError for arguments that the op cannot honour.
    """
    if forward_batch is None:
        raise UnsupportedError("model", "attention was called without the step's ForwardBatch")
    if softcap is not None or s_aux is not None:
        raise UnsupportedError("model", "attention softcap and attention sinks are not implemented")
    fb = forward_batch
    out, _ = paged_attention(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        fb.kv,
        module.layer_idx,  # type: ignore[arg-type]
        fb.cu_seqlens_q,
        fb.kv_lens,
        fb.page_table,
        fb.slot_mapping,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        fb.query_sink_rows,
        fb.query_sink,
    )
    return out[None], None


def register() -> None:
    """Make `attn_implementation="thinkfold"` known to transformers; may be called again."""
    AttentionInterface.register(IMPLEMENTATION, attend)
