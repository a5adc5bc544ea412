"""A whole decoder layer in few operations, for fp32 models on a CPU.

Knows no paged memory, and not which layers it may stand for (see `runner.cpu_fusion`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinkfold.runner.cpu_layers import FusedRMSNorm, PackedLinear

Attend = Callable[..., tuple[Tensor, None]]


class DecoderBlock(nn.Module):
    """Norm, rotary attention, norm, gated SiLU; attention and MLP are each added to what went in.

    Products of one input are one product, and query and key heads are normed and turned together.
    `norms` are those before attention and MLP, then those of query and key heads or none;
    `attend` is the attention with its interface of transformers, `options` what the layer tells it.
    """

    def __init__(self, layer: Any, norms: list[FusedRMSNorm], attend: Attend, options: dict[str, Any]) -> None:
        """`layer` has the children and sizes that `cpu_fusion` asks for."""
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = own.layer_idx
        self.head_dim: int = own.head_dim
        self.scaling: float | None = options.get("scaling")
        self.attend = attend
        self._options = options
        self._num_heads = own.q_proj.out_features // self.head_dim
        self._num_kv_heads = own.k_proj.out_features // self.head_dim
        products = (
            PackedLinear(own.q_proj, own.k_proj, own.v_proj, divided=True),
            PackedLinear(own.o_proj),
            PackedLinear(mlp.gate_proj, mlp.up_proj, divided=True),
            PackedLinear(mlp.down_proj),
        )
        before = [norm.divided(product.scale) for norm, product in zip(norms[:2], products[::2], strict=True)]
        if norms[2:]:
            before = [*before, _side_by_side(norms[2], self._num_heads, norms[3], self._num_kv_heads)]
        self.products, self.norms = nn.ModuleList(products), nn.ModuleList(before)
        # Kept as functions, too: looking a submodule up and calling it costs as much as a small operation.
        self._qkv, self._gate_up = (product.forward for product in products[::2])
        self._add_out, self._add_down = (product.added for product in products[1::2])
        self._norm, self._norm_mlp = (norm.forward for norm in before[:2])
        self._norm_heads = before[2].forward if before[2:] else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """`[1, T, size]` to the same; `position_embeddings` are cos and sin `[1, T, head_dim]`."""
        rows = hidden_states[0]
        query, key, value = self._heads(self._qkv(self._norm(rows)), *position_embeddings)
        mixed, _ = self.attend(self, query, key, value, attention_mask, **self._options, **kwargs)
        rows = self._add_out(mixed.view(len(rows), -1), rows)
        gate, up = self._gate_up(self._norm_mlp(rows)).chunk(2, -1)
        return self._add_down(nn.functional.silu(gate).mul_(up), rows).unsqueeze(0)

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[1, H, T, D]`, the first two normed and turned."""
        split = self._num_heads + self._num_kv_heads
        heads = qkv.view(len(qkv), -1, self.head_dim)
        turned, value = heads.split_with_sizes((split, self._num_kv_heads), 1)
        if self._norm_heads is not None:
            turned = self._norm_heads(turned)
        turned = _turn(turned, cos, sin).transpose(0, 1).unsqueeze(0)
        query, key = turned.split_with_sizes((self._num_heads, self._num_kv_heads), 1)
        return query, key, value.transpose(0, 1).unsqueeze(0)


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: heads `[T, H, D]`, each half by the first halves of cos and sin `[1, T, D]`."""
    num_tokens, num_heads, size = heads.shape
    cos, sin = (table.narrow(-1, 0, size // 2).view(num_tokens, 1, size // 2) for table in (cos, sin))
    halves = heads.view(num_tokens, num_heads, 2, size // 2)
    turned = halves * cos.unsqueeze(1)
    first, second = halves.unbind(2)
    to_first, to_second = turned.unbind(2)
    to_first.addcmul_(second, sin, value=-1)
    to_second.addcmul_(first, sin)
    return turned.view(num_tokens, num_heads, size)


def _side_by_side(query: FusedRMSNorm, num_heads: int, key: FusedRMSNorm, num_kv_heads: int) -> FusedRMSNorm:
    """One norm of all heads, those of queries first."""
    weights = [norm.weight.detach().expand(count, -1) for norm, count in ((query, num_heads), (key, num_kv_heads))]
    return FusedRMSNorm(torch.cat(weights), query.eps)
