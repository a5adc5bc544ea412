"""Keys and values of summaries in 4 bits: blocks of `page_size` entries that carry their own scales.

Keys are cut into 16 levels by channel over the entries of a block, values by entry over up to 64
channels (after KIVI, arXiv 2402.02750), each between its least and largest number. A page of the one
KV tensor holds as many such blocks as fit in its bytes, about three for each raw head block of 16
bits. It knows no summary and no branch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinkfold.errors import ParameterError

LEVELS = 15  # steps between the least and the largest number
CHANNELS = 64  # of a value that share a scale, at most
ALIGN = 16  # bytes at whose multiples blocks begin


class Layout(NamedTuple):
    """Where the parts of a block lie, in bytes from its start.

    Codes of keys `[page_size, head_dim / 2]` come first: byte i holds channel i in its low four bits and
    channel i + head_dim / 2 in its high ones. Codes of values follow, then as fp16 the least and the step
    of each key channel, those of each value's groups, and β of each entry.
    """

    page_size: int
    head_dim: int

    @property
    def groups(self) -> int:
        """Equal runs of channels of a value."""
        least = -(-self.head_dim // CHANNELS)
        return next(n for n in range(least, self.head_dim + 1) if self.head_dim % n == 0)

    @property
    def value_codes(self) -> int:
        return self.page_size * self.head_dim // 2

    @property
    def key_scales(self) -> int:
        return 2 * self.value_codes

    @property
    def value_scales(self) -> int:
        return self.key_scales + 4 * self.head_dim

    @property
    def bias(self) -> int:
        return self.value_scales + 4 * self.page_size * self.groups

    @property
    def block_bytes(self) -> int:
        return -(-(self.bias + 2 * self.page_size) // ALIGN) * ALIGN

    @classmethod
    def of(cls, page_size: int, head_dim: int) -> Layout:
        """Raises ParameterError for an odd `head_dim`: two channels share a byte."""
        if head_dim % 2:
            raise ParameterError("fold_storage", f"int4 needs an even head_dim, the model has {head_dim}")
        return cls(page_size, head_dim)


def page_blocks(layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Blocks in the bytes of one page of keys and values in `dtype`. Raises ParameterError as `Layout.of`."""
    return 2 * layers * kv_heads * page_size * head_dim * dtype.itemsize // Layout.of(page_size, head_dim).block_bytes


def blocks_of(kv: Tensor) -> Tensor:
    """All pages of `kv` as int4 blocks, uint8 `[num_pages, blocks, block_bytes]`; a view.

    Block id = page * blocks + number; bytes behind a page's last block are unused.
    """
    layout, (_, layers, heads, _, page_size, head_dim) = Layout.of(*kv.shape[4:]), kv.shape
    pages, size = kv.view(torch.uint8).flatten(1), layout.block_bytes
    count = page_blocks(layers, heads, page_size, head_dim, kv.dtype)
    return pages[:, : count * size].unflatten(1, (count, size))


def pack(keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Blocks `[n, block_bytes]` of keys and values `[n, page_size, head_dim]` and β `[n, page_size]`.

    A number that is not finite, or beyond fp16, makes its whole group read back as not finite: the request
    fails, aloud.
    """
    layout = Layout.of(*keys.shape[1:])
    k, k_scales = _quantise(keys, 1)
    v, v_scales = _quantise(values.unflatten(-1, (layout.groups, -1)), -1)
    codes = [(part[..., : layout.head_dim // 2] | part[..., layout.head_dim // 2 :] << 4) for part in (k, v.flatten(2))]
    halves = [*(part.flatten(1) for part in (*k_scales, *v_scales)), bias.half()]
    parts = [part.flatten(1) for part in codes] + [half.contiguous().view(torch.uint8) for half in halves]
    packed = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(packed, (0, layout.block_bytes - packed.shape[1]))


def unpack(blocks: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[..., page_size, head_dim]` in `dtype`, and β `[..., page_size]`, of blocks `[..., bytes]`."""
    rows = torch.empty(2, *blocks.shape[:-1], layout.page_size, layout.head_dim, dtype=dtype, device=blocks.device)
    bias = unpack_into(rows, blocks, layout)
    return rows[0], rows[1], bias


def unpack_into(rows: Tensor, blocks: Tensor, layout: Layout) -> Tensor:
    """Write keys and values to `rows` `[2, ..., page_size, head_dim]`; returns β fp32. Products are at least fp32."""
    size, dim, groups = layout.page_size, layout.head_dim, layout.groups
    wide = rows if rows.dtype in (torch.float32, torch.float64) else torch.empty_like(rows, dtype=torch.float32)
    nibbles = blocks[..., : layout.key_scales].unflatten(-1, (2, size, dim // 2)).movedim(-3, 0)
    wide[..., : dim // 2].copy_(nibbles & 15)
    wide[..., dim // 2 :].copy_(nibbles >> 4)
    halves = blocks[..., layout.key_scales : layout.bias + 2 * size].view(torch.float16).float()
    k_scales, v_scales, bias = halves.split([2 * dim, 2 * size * groups, size], dim=-1)
    least, step = k_scales.unflatten(-1, (2, 1, dim)).unbind(-3)
    wide[0].mul_(step).add_(least)
    least, step = v_scales.unflatten(-1, (2, size, groups, 1)).unbind(-4)
    wide[1].unflatten(-1, (groups, -1)).mul_(step).add_(least)
    if wide is not rows:
        rows.copy_(wide)
    return bias


def rounded(keys: Tensor, values: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., n, head_dim]` as they read back; n is a multiple of `page_size`."""
    layout, shape = Layout.of(page_size, keys.shape[-1]), keys.shape
    k, v = (rows.reshape(-1, page_size, shape[-1]) for rows in (keys, values))
    k, v, _ = unpack(pack(k, v, k.new_zeros(k.shape[:2])), layout, keys.dtype)
    return k.view(shape), v.view(shape)


def _quantise(rows: Tensor, dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Codes of `rows`, and the least and the step of each group along `dim` as fp16."""
    wide = rows.float()
    least = wide.amin(dim, keepdim=True).half()
    step = ((wide.amax(dim, keepdim=True) - least.float()) / LEVELS).half()
    codes = (wide - least.float()) / step.float().clamp(min=torch.finfo(torch.float16).tiny)
    return codes.round().clamp(0, LEVELS).nan_to_num(0.0).to(torch.uint8), (least, step)
