"""Faster layers with equal results for fp32 models on a CPU, put in place of a loaded model's own.

Knows nothing about models beyond their linear and RMS norm children.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed once for oneDNN; the plain weight is not kept.

    Packing in every call costs more than the product of a few rows, and with a packed weight a
    row's bits do not depend on how many rows are multiplied with it. Several linear layers of the
    same input become one product, their outputs side by side.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        weight = torch.cat([linear.weight.detach() for linear in linears]) if linears[1:] else linears[0].weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._product = torch.ops.mkldnn._linear_pointwise.default  # finding it costs as much as a small operation
        self.bias = _joined_bias(linears)

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return self._product(rows, self._packed, self.bias, "none", [], "")


class FusedRMSNorm(nn.Module):
    """RMS norm over the last dimension in few operations, each exact to the last bit for every number of rows.

    `weight` `[..., size]` may differ by head. torch's own on a CPU is eight operations.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight
        size = weight.shape[-1]
        self._scaled_weight = weight.detach() * size**0.5
        self._scaled_eps = weight.new_tensor(eps * size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        norm = torch.linalg.vector_norm(hidden, 2, -1, True)
        return (hidden * torch.addcmul(self._scaled_eps, norm, norm).rsqrt_()).mul_(self._scaled_weight)


def speed_up(model: nn.Module) -> None:
    """Replace linear layers and RMS norms below an fp32 `model` on a CPU; tied embeddings stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
            elif (fused := fused_norm(child)) is not None:
                setattr(parent, name, fused)


@torch.inference_mode()
def fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A fused norm if `module` is an RMS norm in the usual form, which is tried on random rows."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or weight.ndim != 1:
        return None
    fused = FusedRMSNorm(weight, eps)
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    return fused if torch.allclose(module(rows), fused(rows), rtol=1e-6, atol=1e-7) else None


def _joined_bias(linears: tuple[nn.Linear, ...]) -> Tensor | None:
    """Biases side by side, 0 where one has none."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )
