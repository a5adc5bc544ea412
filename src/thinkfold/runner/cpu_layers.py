"""Faster layers with equal results for fp32 models on a CPU, put in place of a loaded model's own.

Knows nothing about models beyond their linear and RMS norm children.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed once for oneDNN; the plain weight is not kept.

    Packing in every call costs more than the product of a few rows, and with a packed weight a
    row's bits do not depend on how many rows are multiplied with it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


class FusedRMSNorm(nn.Module):
    """RMS norm over the last dimension as one operation instead of six."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self._eps)


def speed_up(model: nn.Module) -> None:
    """Replace linear layers and RMS norms below an fp32 `model` on a CPU; tied embeddings stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
            elif (fused := _fused_norm(child)) is not None:
                setattr(parent, name, fused)


@torch.inference_mode()
def _fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A fused norm if `module` is one in the usual form, which is tried on random rows."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or weight.ndim != 1:
        return None
    fused = FusedRMSNorm(weight, eps)
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    return fused if torch.allclose(module(rows), fused(rows), rtol=1e-6, atol=1e-7) else None
