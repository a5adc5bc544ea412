"""Which exceptions are one request's own, and which say that the device or its memory is broken."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_cpu")  # torch raises RuntimeError on a CPU


def is_device_fault(error: BaseException) -> bool:
    """Whether nothing that runs on this device can be trusted any more: device errors and memory beside the pool."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("CUDA" in text or any(sign in text for sign in _OUT_OF_MEMORY))
