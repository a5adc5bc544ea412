"""Which head blocks hold the summaries of a line, found once and kept until the tables change.

A line is one row of the summary tables. It knows no queries and no raw pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.attention.padding import additive_mask, rounded_up

_MEMO = "_thinkfold_summary_plan"


class SummaryPiece(NamedTuple):
    """All summary entries of a line in one layer: `length` places a head, the first ones in use.

    `length` is the most entries of a head, rounded up: it depends on nothing but the line itself.
    `numbers` `[Hkv * P]` are its blocks as the table has them, `blocks` `[2, Hkv, P]` their keys and values where they
    are head blocks: rows of kv seen as `[-1, page_size * D]`;
    `stale_heads`, `stale_entries` `[s]` are places behind a head's end that may hold anything;
    `mask` `[1, Hkv, 1, length]` is 0 at entries and -inf elsewhere.
    """

    length: int
    numbers: Tensor
    blocks: Tensor
    stale_heads: Tensor
    stale_entries: Tensor
    mask: Tensor


class _Line(NamedTuple):
    lengths: NDArray[np.int32]
    blocks: NDArray[np.int32]
    pieces: list[SummaryPiece | None]


@dataclass(slots=True, eq=False)
class SummaryPlan:
    """The tables as they were at one time, and the lines asked for so far.

    `lines` may hold what a line was at an earlier time; `checked` are those that hold now.
    """

    kv_shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    lengths: Tensor
    stamp: tuple[int, int] | None
    host_table: NDArray[np.int32]
    host_lengths: NDArray[np.int32]
    lines: dict[int, _Line]
    checked: set[int]

    def pieces(self, line: int) -> list[SummaryPiece | None]:
        """The line's summaries by layer, None in a layer without an entry; empty without any at all.

        Raises ValueError for a line outside the tables or entries beyond its blocks.
        """
        if line not in self.checked:
            self._check(line)
        return self.lines[line].pieces

    def _check(self, line: int) -> None:
        """Make `lines[line]` what the tables say, keeping it where it already is."""
        if line >= self.host_lengths.shape[1]:
            raise ValueError(f"summary_rows names line {line} of {self.host_lengths.shape[1]}")
        lengths, blocks = self.host_lengths[:, line], self.host_table[:, line]  # [L, Hkv], [L, Hkv, S]
        old = self.lines.get(line)
        if old is None or not np.array_equal(old.lengths, lengths) or not np.array_equal(old.blocks, blocks):
            room = blocks.shape[2] * self.kv_shape[4]
            if lengths.min() < 0 or lengths.max() > room:
                raise ValueError(f"summary_lens of line {line} must lie in [0, {room}], the room of its blocks")
            pieces = [self._piece(*layer) for layer in zip(lengths, blocks, strict=True)] if lengths.any() else []
            self.lines[line] = _Line(lengths.copy(), blocks.copy(), pieces)
        self.checked.add(line)

    def _piece(self, lengths: NDArray[np.int32], table: NDArray[np.int32]) -> SummaryPiece | None:
        if not lengths.any():
            return None
        page_size = self.kv_shape[4]
        length = rounded_up(int(lengths.max()))
        ends = lengths.astype(np.int64)[:, None]
        used = -(-ends // page_size)
        columns = np.arange(length // page_size)
        # Behind its last block a head repeats its own first one; one without a block reads any, as stale.
        ids = table[np.arange(len(lengths))[:, None], np.where(columns < used, columns, 0)].astype(np.int64)
        ids[lengths == 0] = 0
        entries = np.arange(length)
        outside = entries >= ends
        heads, places = np.nonzero(outside & ((entries < used * page_size) | (used <= 1)))
        return SummaryPiece(
            length,
            torch.from_numpy(ids.reshape(-1)).to(self.device),
            torch.from_numpy(np.stack([2 * ids, 2 * ids + 1])).to(self.device),
            torch.from_numpy(heads).to(self.device),
            torch.from_numpy(places).to(self.device),
            additive_mask(torch.from_numpy(outside[None, :, None]).to(self.device), self.dtype),
        )


def summary_plan(kv: Tensor, table: Tensor, lengths: Tensor, dtype: torch.dtype) -> SummaryPlan:
    """The plan of the tables as they are, kept on `table` until one of them changes.

    In-place operations of torch on `table` and `lengths` count a version, and a plan holds while
    neither has changed. Inference tensors count none: their plan is made anew every time, out of
    the lines that are still the same.
    """
    known: SummaryPlan | None = getattr(table, _MEMO, None)
    stamp = None if table.is_inference() or lengths.is_inference() else (table._version, lengths._version)
    lines: dict[int, _Line] = {}
    if known is not None and (known.kv_shape, known.dtype) == (kv.shape, dtype):
        if stamp is not None and known.stamp == stamp and known.lengths is lengths:
            return known
        lines = known.lines
    host = table.cpu().numpy(), lengths.cpu().numpy()
    plan = SummaryPlan(kv.shape, dtype, table.device, lengths, stamp, *host, lines, set())
    setattr(table, _MEMO, plan)
    return plan
