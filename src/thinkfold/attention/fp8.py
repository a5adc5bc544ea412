"""Keys and values as float8_e4m3fn with one fp16 scale a token and head; knows no pages."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., D]` and fp16 scales `[...]` of `rows` `[..., D]`.

    A scale is amax / 448 rounded up, so that nothing saturates, and is never 0. A row that is not
    finite, or whose amax is beyond 448 * 65504, reads back as NaN: its request fails, aloud.
    """
    wide = rows.float()
    exact = wide.abs().amax(-1) / LARGEST
    nearest = exact.half()
    # Positive floats are ordered as their bits are: one more is the next larger number.
    scales = (nearest.view(torch.int16) + (nearest.float() < exact)).clamp_(min=1).view(torch.float16)
    return (wide / scales.float()[..., None]).to(FP8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `[..., D]` in `dtype` of `codes` `[..., D]` and `scales` `[...]`; products are fp32."""
    return (codes.float() * scales.float()[..., None]).to(dtype)
