"""Integers from the host to the device: many arrays, one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


def to_device(arrays: Sequence[ArrayLike], device: torch.device) -> list[Tensor]:
    """int64 tensors of the arrays' shapes on `device`, views of one buffer: one copy, which does not wait."""
    whole = [np.asarray(array, dtype=np.int64) for array in arrays]
    packed = torch.from_numpy(concat([array.reshape(-1) for array in whole]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in whole])
    return [part.view(array.shape) for part, array in zip(parts, whole, strict=True)]


def pinned(words: int, device: torch.device) -> Tensor:
    """An int64 buffer on the host from which a copy to a GPU does not wait; it may be let go at once."""
    return torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")


def concat(arrays: Sequence[IntArray]) -> IntArray:
    """The arrays in a row; none give an empty one."""
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
