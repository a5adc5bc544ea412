"""The door between transformers' models and our attention op.

A model whose config names one of `IMPLEMENTATIONS` calls `attend` in every layer, with the body of
attention that the name stands for. No mask function is registered under these names, so
transformers builds no mask at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import AttentionInterface

from thinkfold.attention.ops import paged_attention
from thinkfold.errors import UnsupportedError
from thinkfold.runner.forward_batch import ForwardBatch

IMPLEMENTATION = "thinkfold"
# Names that transformers knows, by body of the attention op.
IMPLEMENTATIONS: Mapping[str, str] = MappingProxyType(
    {
        "reference": IMPLEMENTATION,
        "triton": "thinkfold_triton",
        "reference_int4": "thinkfold_int4",
        "triton_int4": "thinkfold_triton_int4",
    }
)


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
    backend: str = "reference",
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
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        fb.kv,
        module.layer_idx,  # type: ignore[arg-type]
        fb.cu_seqlens_q,
        fb.kv_lens,
        fb.page_table,
        fb.slot_mapping,
        fb.summary_rows,
        fb.summary_table,
        fb.summary_lens,
        fb.bias,
        fb.kv_scales,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        fb.query_sink_rows,
        fb.query_sink,
        fb.lse_sink,
        backend,
    )
    return out[None], None


def register() -> None:
    """Make all `IMPLEMENTATIONS` known to transformers; may be called again."""
    for backend, name in IMPLEMENTATIONS.items():
        AttentionInterface.register(name, partial(attend, backend=backend))
