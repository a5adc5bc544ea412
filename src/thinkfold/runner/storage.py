"""The one KV tensor: its memory, bytes per page and whole-page copies.

It does not know who owns a page.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


class KVStorage:
    """`tensor` is `[num_pages, num_layers, num_kv_heads, 2, page_size, head_dim]`.

    A page holds `page_size` tokens of all layers and heads in one contiguous piece, K before V
    in each head block. Memory of a page on a CPU is committed when it is first written.
    """

    def __init__(
        self,
        num_pages: int,
        num_layers: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, num_layers, num_kv_heads, 2, page_size, head_dim)
        self.page_bytes = page_bytes(num_layers, num_kv_heads, page_size, head_dim, dtype)
        self.tensor = _host_tensor(shape, dtype) if device.type == "cpu" else _device_tensor(shape, dtype, device)

    @property
    def num_pages(self) -> int:
        return self.tensor.shape[0]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, all sources read before any target is written; int64 `[n]` each."""
        self.tensor.index_copy_(0, targets, self.tensor.index_select(0, sources))


def page_bytes(num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page."""
    return num_layers * num_kv_heads * 2 * page_size * head_dim * dtype.itemsize


def _device_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed anonymous memory in huge pages where the system has them: gathers miss the TLB less."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, **_private_flags())
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _private_flags() -> dict[str, int]:
    if hasattr(mmap, "MAP_PRIVATE"):
        return {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return {}
