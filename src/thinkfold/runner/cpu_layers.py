"""Faster layers with equal results for fp32 models on a CPU, put in place of a loaded model's own.

Knows nothing about models beyond their linear and RMS norm children.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

FBGEMM = ("fbgemm", "x86")  # torch's names for engines that have it
EXACT = 2.0**-40  # of the largest weight: far below what rounding of fp32 takes from each product


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight packed once; the plain weight is not kept.

    Packing in every call costs more than the product of a few rows, and with a packed weight a
    row's bits depend little on how many rows are multiplied with it (`invariance.row_tile`). Several
    linear layers of the same input become one product, their outputs side by side. A weight that
    float16 can hold, times a power of two, as that of a bf16 checkpoint, is packed by FBGEMM: half
    the memory to read, and products and sums in fp32 as ever. Others are packed by oneDNN.

    `scale` is that power of two, else 1. With `divided` inputs come divided by it, so that outputs
    need not be.
    """

    def __init__(self, *linears: nn.Linear, divided: bool = False) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        weight = (
            torch.cat([linear.weight.detach() for linear in linears]) if linears[1:] else linears[0].weight.detach()
        )
        self.bias = _joined_bias(linears)
        scale = _float16_scale(weight)
        self.scale = scale or 1.0
        self._inverse = 1.0 if divided else 1 / self.scale
        # Finding an operation, and asking whether its arguments are real, costs as much as a small one.
        if scale is None:
            self._product = torch.ops.mkldnn._linear_pointwise.default._op
            self._more = (torch.ops.mkldnn._reorder_linear_weight(weight), self.bias, "none", [], "")
        else:
            bias = self.bias if divided or self.bias is None else self.bias * scale
            self._product = torch.ops.quantized.linear_dynamic_fp16.default._op
            self._more = (torch.ops.quantized.linear_prepack_fp16(weight * scale, bias),)

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product = self._product(rows, *self._more)
        return product if self._inverse == 1.0 else product.mul_(self._inverse)

    def added(self, rows: Tensor, others: Tensor) -> Tensor:
        """`others` and what `rows` become, in one operation."""
        return torch.add(others, self._product(rows, *self._more), alpha=self._inverse)


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

    def divided(self, by: float) -> FusedRMSNorm:
        """The same, with outputs divided by a power of two: no bit of them changes."""
        return FusedRMSNorm(self.weight.detach() / by, self.eps)

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


def _float16_scale(weight: Tensor) -> float | None:
    """The power of two by which float16 holds `weight` as exactly as fp32 sums can tell, None if there is none."""
    largest = float(weight.abs().max())
    if torch.backends.quantized.engine not in FBGEMM or not 0.0 < largest < torch.inf:
        return None
    scale = 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))
    scaled = weight * scale
    lost = float((scaled.half().float() - scaled).abs().max())
    return scale if lost <= EXACT * largest * scale else None
