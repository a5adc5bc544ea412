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

from thinkfold.attention import int4 as four_bits
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
    first entry on that needs one; else both are `[0]`. With `int4` a page lent to summaries is cut into the
    blocks of `attention.int4` instead of head blocks, and there is no `bias`. The host tier has `host_pages` pages of
    the same kind, pinned for a GPU. Memory of a page on a CPU is committed when it is first written.
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
        int4: bool = False,
    ) -> None:
        shape = (num_layers, num_kv_heads, 2, page_size, head_dim)
        self.page_bytes = page_bytes(num_layers, num_kv_heads, page_size, head_dim, dtype, bias=bias)
        self._device = device
        self._num_pages = num_pages
        self._host_pages = host_pages
        self._heads = num_layers * num_kv_heads
        self._page_size = page_size
        self.layout = four_bits.Layout.of(page_size, head_dim) if int4 else None
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
        self._copy(pairs, self._pages())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy summary blocks (source, target), all sources read before any target is written."""
        self._copy(pairs, self._blocks())

    def pages_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to the host tier, (device, host); a GPU does it in its own time."""
        self._out(pairs, self._pages())

    def blocks_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy summary blocks to the host tier, (device, host)."""
        self._out(pairs, self._blocks())

    def pages_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages from the host tier, (host, device)."""
        self._in(pairs, self._pages())

    def blocks_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy summary blocks from the host tier, (host, device)."""
        self._in(pairs, self._blocks())

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
        return (pages[number] * self._heads + heads - number) * self._page_size + tokens

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

    def write_blocks(self, blocks: Tensor, packed: Tensor) -> None:
        """Write int4 blocks `[n, block_bytes]` by id `[n]`."""
        self._blocks()[0].put(blocks, packed)

    def read_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[L, Hkv, T, D]` fp32 of int4 blocks by head, `[L * Hkv, T / page_size]`."""
        assert self.layout is not None, "there are no int4 blocks"
        keys, values, _ = four_bits.unpack(self._blocks()[0].take(blocks.flatten()), self.layout, torch.float32)
        layers, heads = self.tensor.shape[1:3]
        return tuple(part.view(layers, heads, -1, part.shape[-1]) for part in (keys, values))  # type: ignore[return-value]

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

    def _pages(self) -> list[_Twins]:
        """All planes in whole pages."""
        return [_Twins.of(*pair, self._num_pages) for pair in self._planes()]

    def _blocks(self) -> list[_Twins]:
        """All planes in the blocks of summaries."""
        if self.layout is not None:
            return [_Twins(four_bits.blocks_of(self.tensor), four_bits.blocks_of(self._host))]
        return [_Twins.of(*pair, self._num_pages * self._heads) for pair in self._planes()]

    def _planes(self) -> list[tuple[Tensor, Tensor]]:
        """The planes that there are, with their twins."""
        planes = (self.tensor, self._host), (self.scales, self._host_scales), (self.bias, self._host_bias)
        return [(mine, host) for mine, host in planes if mine.numel()]

    def _copy(self, pairs: Sequence[tuple[int, int]], twins: Sequence[_Twins]) -> None:
        sources, targets = to_device([[pair[i] for pair in pairs] for i in (0, 1)], self._device)
        for twin in twins:
            twin.put(targets, twin.take(sources))

    def _out(self, pairs: Sequence[tuple[int, int]], twins: Sequence[_Twins]) -> None:
        for mine, first, count in _runs([(target, source) for source, target in pairs], twins[0].run):
            (index,) = to_device([mine], self._device)
            for twin in twins:
                twin.on_host(first, count).copy_(twin.take(index), non_blocking=True)

    def _in(self, pairs: Sequence[tuple[int, int]], twins: Sequence[_Twins]) -> None:
        for mine, first, count in _runs(pairs, twins[0].run):
            (index,) = to_device([mine], self._device)
            for twin in twins:
                twin.put(index, twin.on_host(first, count).to(self._device, non_blocking=True))


class _Twins(NamedTuple):
    """A plane and its twin on the host in units of a kind: `[n, …]`, or `[pages, units of a page, …]`.

    The units of two pages need not be as far from each other as those of one.
    """

    mine: Tensor
    host: Tensor

    @classmethod
    def of(cls, mine: Tensor, host: Tensor, count: int) -> _Twins:
        """Planes without gaps, of which the device's has `count` units."""
        unit = mine.numel() // count
        return cls(_raw(mine).view(-1, unit), _raw(host).view(-1, unit))

    @property
    def run(self) -> int | None:
        """Units that lie side by side on the host, None: all."""
        return self.host.shape[1] if self.host.dim() == 3 else None

    def take(self, index: Tensor) -> Tensor:
        return self.mine.index_select(0, index) if self.run is None else self.mine[self._places(index)]

    def put(self, index: Tensor, rows: Tensor) -> None:
        if self.run is None:
            self.mine.index_copy_(0, index, rows)
        else:
            self.mine[self._places(index)] = rows

    def on_host(self, first: int, count: int) -> Tensor:
        """So many units of one run."""
        if self.run is None:
            return self.host[first : first + count]
        page, place = divmod(first, self.run)
        return self.host[page, place : place + count]

    def _places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        page = torch.div(index, self.mine.shape[1], rounding_mode="floor")
        return page, index - page * self.mine.shape[1]


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


def _runs(pairs: Sequence[tuple[int, int]], run: int | None) -> Iterator[tuple[list[int], int, int]]:
    """Pairs (host, device) in pieces that are contiguous on the host: device ids, first host id, how many.

    None holds two host ids with a multiple of `run` between them.
    """
    piece: list[int] = []
    first = 0
    for host, mine in sorted(pairs):
        ends = run is not None and host % run == 0
        if piece and (ends or host != first + len(piece) or len(piece) == TRANSFER_PIECE):
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
