"""KV memory: the one KV tensor, its planes, their twins on the host, and copies of pages, head blocks and entries.

It does not know who owns a page.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8, dequantise, quantise
from thinkfold.runner.transfer import to_device

# Whole pages or head blocks that go to or from the host through one piece of device memory.
TRANSFER_PIECE = 64


class Stored(NamedTuple):
    """Entries as memory holds them: keys and values `[n, D]`, and with fp8 their scales `[n]`."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None

    def replaced(self, where: Tensor, other: Stored) -> Stored:
        """`other`'s entries where `where` `[n]` is true, its own elsewhere."""
        rows = where.unsqueeze(-1)
        scales = None
        if self.scales is not None and other.scales is not None:
            mine, others = self.scales, other.scales
            scales = torch.where(where, others[0], mine[0]), torch.where(where, others[1], mine[1])
        return Stored(torch.where(rows, other.keys, self.keys), torch.where(rows, other.values, self.values), scales)


class KVStorage:
    """`tensor` is `[num_pages, num_layers, num_kv_heads, 2, page_size, head_dim]`.

    A page holds `page_size` tokens of all layers and heads in one contiguous piece, K before V
    in each head block; block id = (page · layers + layer) · kv_heads + head, entry id = block ·
    page_size + place. `scales` `[num_pages, layers, kv_heads, 2, page_size]` exist where `dtype`
    is float8_e4m3fn, `bias` `[num_pages, layers, kv_heads, page_size]` if asked for or from the
    first entry on that needs one; else both are `[0]`. The host tier has `host_pages` pages of the same kind,
    pinned for a GPU. Memory of a page on a CPU is committed when it is first written.
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
        host_pages: int = 0,
        *,
        bias: bool = False,
    ) -> None:
        shape = (num_layers, num_kv_heads, 2, page_size, head_dim)
        self.page_bytes = page_bytes(num_layers, num_kv_heads, page_size, head_dim, dtype, bias=bias)
        self._device = device
        self._num_pages = num_pages
        self._host_pages = host_pages
        self._blocks = num_layers * num_kv_heads  # of a page
        self._page_size = page_size
        self.tensor, self._host = self._plane(shape, dtype)
        self.scales, self._host_scales = self._plane(shape[:-1] if dtype == FP8 else None, torch.float16)
        self.bias, self._host_bias = self._plane(shape[:2] + shape[3:4] if bias else None, torch.float32)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def host_pages(self) -> int:
        return self._host_pages

    def need_bias(self) -> None:
        """Make the β plane, 0 everywhere, if there is none."""
        if not self.bias.numel():
            layers, heads = self.tensor.shape[1:3]
            self.bias, self._host_bias = self._plane((layers, heads, self._page_size), torch.float32)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target), all sources read before any target is written."""
        self._copy(pairs, 1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy head blocks (source, target), all sources read before any target is written."""
        self._copy(pairs, self._blocks)

    def pages_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to the host tier, (device, host); a GPU does it in its own time."""
        self._out(pairs, 1)

    def blocks_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy head blocks to the host tier, (device, host)."""
        self._out(pairs, self._blocks)

    def pages_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages from the host tier, (host, device)."""
        self._in(pairs, 1)

    def blocks_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy head blocks from the host tier, (host, device)."""
        self._in(pairs, self._blocks)

    def read_span(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole pages in order, fp32 `[L, Hkv, T, D]` each; fp64 where memory is."""
        rows = _raw(self.tensor).index_select(0, pages).view(self.tensor.dtype)
        if rows.dtype == FP8:
            rows = dequantise(rows, self.scales.index_select(0, pages), torch.float32)
        wide = torch.promote_types(rows.dtype, torch.float32)
        keys, values = rows.to(wide).permute(3, 1, 2, 0, 4, 5).flatten(3, 4)
        return keys, values

    def token_ids(self, pages: Tensor, heads: Tensor, tokens: Tensor) -> Tensor:
        """Entry ids of tokens `[n]` of the raw `pages` in heads `[n]`."""
        number = torch.div(tokens, self._page_size, rounding_mode="floor")
        return (pages[number] * self._blocks + heads - number) * self._page_size + tokens

    def read(self, entries: Tensor) -> Stored:
        """Entries by id `[n]`, as memory holds them."""
        rows = self._rows(entries)
        flat = _raw(self.tensor).flatten(0, 4)
        scales = self.scales.flatten()
        found = (scales.index_select(0, rows[0]), scales.index_select(0, rows[1])) if scales.numel() else None
        return Stored(flat.index_select(0, rows[0]), flat.index_select(0, rows[1]), found)

    def encode(self, keys: Tensor, values: Tensor) -> Stored:
        """Keys and values `[n, D]` as memory would hold them."""
        if not self.scales.numel():
            return Stored(keys.to(self.tensor.dtype), values.to(self.tensor.dtype), None)
        (k, k_scale), (v, v_scale) = quantise(keys), quantise(values)
        return Stored(_raw(k), _raw(v), (k_scale, v_scale))

    def write(self, entries: Tensor, stored: Stored, bias: Tensor | None = None) -> None:
        """Write entries by id `[n]`; `bias` `[n]` is their β, None means 0. A β needs the plane."""
        rows = self._rows(entries)
        flat, scales = _raw(self.tensor).view(-1, stored.keys.shape[-1]), self.scales.view(-1)
        for at, part in zip(rows, (stored.keys, stored.values), strict=True):
            flat.index_copy_(0, at, part)
        for at, scale in zip(rows, stored.scales or (), strict=False):
            scales.index_copy_(0, at, scale)
        if self.bias.numel():
            beta = torch.zeros_like(entries, dtype=self.bias.dtype) if bias is None else bias.to(self.bias.dtype)
            self.bias.view(-1).index_copy_(0, entries, beta)

    def _rows(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys and of values in the tensor seen as `[-1, head_dim]`."""
        keys = entries + torch.div(entries, self._page_size, rounding_mode="floor") * self._page_size
        return keys, keys + self._page_size

    def _plane(self, shape: tuple[int, ...] | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A plane on the device and its twin on the host; two empty ones without a shape."""
        if shape is None:
            return torch.zeros(0, dtype=dtype, device=self._device), torch.zeros(0, dtype=dtype)
        mine, host = (self._num_pages, *shape), (self._host_pages, *shape)
        if self._device.type == "cpu":
            return _host_tensor(mine, dtype), _host_tensor(host, dtype)
        pinned = torch.zeros(host, dtype=dtype, pin_memory=self._host_pages > 0)
        return torch.zeros(mine, dtype=dtype, device=self._device), pinned

    def _pairs(self, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All planes with their twins, seen as `[-1, …]` in units of which a page has `parts`."""
        for mine, host in (
            (self.tensor, self._host),
            (self.scales, self._host_scales),
            (self.bias, self._host_bias),
        ):
            if mine.numel():
                unit = mine.numel() // (self._num_pages * parts)
                yield _raw(mine).view(-1, unit), _raw(host).view(-1, unit)

    def _copy(self, pairs: Sequence[tuple[int, int]], parts: int) -> None:
        sources, targets = _columns(pairs, self._device)
        for plane, _ in self._pairs(parts):
            plane.index_copy_(0, targets, plane.index_select(0, sources))

    def _out(self, pairs: Sequence[tuple[int, int]], parts: int) -> None:
        for mine, first, count in _runs([(target, source) for source, target in pairs]):
            (index,) = to_device([mine], self._device)
            for plane, host in self._pairs(parts):
                host[first : first + count].copy_(plane.index_select(0, index), non_blocking=True)

    def _in(self, pairs: Sequence[tuple[int, int]], parts: int) -> None:
        for mine, first, count in _runs(pairs):
            (index,) = to_device([mine], self._device)
            for plane, host in self._pairs(parts):
                plane.index_copy_(0, index, host[first : first + count].to(self._device, non_blocking=True))


def page_bytes(
    num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, *, bias: bool = False
) -> int:
    """Bytes of one page, with its scales where `dtype` is float8_e4m3fn, and with `bias` its β."""
    scale = torch.float16.itemsize if dtype == FP8 else 0
    entry = 2 * (head_dim * dtype.itemsize + scale) + (torch.float32.itemsize if bias else 0)
    return num_layers * num_kv_heads * page_size * entry


def _raw(plane: Tensor) -> Tensor:
    """fp8 as bytes: copies by index know no fp8."""
    return plane.view(torch.uint8) if plane.dtype == FP8 else plane


def _columns(pairs: Sequence[tuple[int, int]], device: torch.device) -> list[Tensor]:
    return to_device([[pair[i] for pair in pairs] for i in (0, 1)], device)


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], int, int]]:
    """Pairs (host, device) in pieces that are contiguous on the host: device ids, first host id, how many."""
    piece: list[int] = []
    first = 0
    for host, mine in sorted(pairs):
        if piece and (host != first + len(piece) or len(piece) == TRANSFER_PIECE):
            yield piece, first, len(piece)
            piece = []
        first = first if piece else host
        piece.append(mine)
    if piece:
        yield piece, first, len(piece)


def _host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed anonymous memory in huge pages where the system has them: gathers miss the TLB less."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, **_private_flags())
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _private_flags() -> dict[str, int]:
    if hasattr(mmap, "MAP_PRIVATE"):
        return {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return {}
