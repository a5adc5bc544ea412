"""A fold of exact entries in five Triton launches: what stays of a span, how wrong that is, and writing it.

PyTorch's operations are fifteen times as many; what they cost is the host's time. It serves the selector that
`fold.budgets` has tables for, without pooled entries, and memory that keeps summaries as it keeps raw ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8
from thinkfold.fold.segments import Summary
from thinkfold.runner.attention_facts import AttentionFacts
from thinkfold.runner.fold_queries import FoldQueries
from thinkfold.runner.query_store import QueryStore
from thinkfold.runner.storage import KVStorage
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.runner.transfer import to_device

LOG2_E = 1 / math.log(2)
LEAST_DOT = 16  # `tl.dot` takes no smaller dimension
JUDGED = 32  # tokens that a program of `squares` attends to together: more do not fit its registers
ORDERED = 1024  # scores that a program of `choose` looks at together


class _Tiles(NamedTuple):
    """Rows and tokens of one program, and its warps."""

    rows: int
    tokens: int
    warps: int


class FoldKernels:
    """The launches of one KV storage's folds. Sizes of programs hang on the model alone: each kernel is made once."""

    def __init__(self, storage: KVStorage, tables: SummaryTables, queries: QueryStore, facts: AttentionFacts) -> None:
        from thinkfold.runner import triton_choose, triton_fold_gate, triton_fold_write, triton_importance

        self._look: Any = triton_importance.look
        self._score: Any = triton_importance.score
        self._choose: Any = triton_choose.choose
        self._squares: Any = triton_fold_gate.squares
        self._write: Any = triton_fold_write.write
        self._storage, self._tables, self._queries, self._facts = storage, tables, queries, facts
        _, self._layers, self._heads, _, self._page_size, dim = storage.tensor.shape
        self._sizes = {"HEAD_DIM": dim, "LANES": max(LEAST_DOT, 1 << (dim - 1).bit_length())}
        self._sizes |= {"PAGE_SIZE": self._page_size, "FP8": storage.tensor.dtype == FP8}
        self._windowed = facts.windowed.byte()

    def make(self) -> None:
        """Compile every kernel, so that no fold waits for it: launch them for a fold of nothing."""
        counts = [0] * (self._layers * self._heads)
        summary, _ = self.prepare(0, [], FoldQueries([], [], [], []), counts, [], 0)
        self.write(summary, 0, [], counts, counts)

    def prepare(
        self,
        slot: int,
        pages: Sequence[int],
        queries: FoldQueries,
        counts: Sequence[int],
        ends: Sequence[int],
        conclusion: int,
    ) -> tuple[Summary, Tensor]:
        """What stays of the raw `pages`, `counts` entries by head, and the gate's squares `[L, 2]`.

        As `conclusion_attention` chooses, `ends` and all.
        """
        turning = queries.past if self._facts.inv_freq is not None else []
        choosing = [*queries.late, *turning]
        turns = [0] * len(queries.late) + queries.turns[: len(turning)]
        lines = self._queries.lines(slot, [*choosing, *queries.held])
        device = self._storage.tensor.device
        places, choose, judge, ways, wanted, edges = to_device(
            [pages, lines[: len(choosing)], lines[len(choosing) :], turns, counts, ends], device
        )
        with _on(device):
            scores = self._importance(places, choose, ways, edges, conclusion)
            indices = torch.empty(self._layers, self._heads, max(counts), dtype=torch.int64, device=device)
            tokens, width = scores.shape[1], indices.shape[2]
            heads = (len(counts),)
            self._choose[heads](scores, wanted, indices, tokens, width, LANES=ORDERED)
            squares = self._judge(places, judge, indices, wanted)
        return Summary(indices[None]), squares

    def write(
        self, summary: Summary, slot: int, pages: Sequence[int], counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        """The `counts` exact entries of a span's raw `pages` behind the `starts` ones that a slot's heads have.

        The slot's table has grown already.
        """
        storage, table = self._storage, self._tables.table
        numbers, before, places = to_device([counts, starts, pages], storage.tensor.device)
        indices, tile = summary.indices[0].contiguous(), self._page_size
        kv = storage.tensor.view(torch.uint8) if self._sizes["FP8"] else storage.tensor
        with _on(kv.device):
            self._write[len(counts), -(-indices.shape[2] // tile)](
                kv,
                storage.scales,
                storage.bias,
                places,
                indices,
                numbers,
                before,
                table,
                slot,
                indices.shape[2],
                table.shape[1],
                table.shape[3],
                len(counts),
                int(storage.bias.numel() > 0),
                HEADS=self._heads,
                BLOCK_N=tile,
                **self._sizes,
            )

    def _importance(self, pages: Tensor, lines: Tensor, turns: Tensor, ends: Tensor, conclusion: int) -> Tensor:
        """RMS attention × ‖v‖ `[heads, T]`, +inf for the conclusions."""
        storage, (queries, _) = self._storage, self._queries.reserve()
        heads, group = self._layers * self._heads, queries.shape[2] // self._heads
        tiles, inv_freq = _tiles(queries.dtype), self._facts.inv_freq
        tokens, count = len(pages) * self._page_size, len(lines) * group
        row_tiles = -(-count // tiles.rows)
        padded = row_tiles * tiles.rows
        rows = torch.empty(heads, padded, self._sizes["LANES"], dtype=queries.dtype, device=queries.device)
        lse = torch.empty(heads, padded, dtype=torch.float32, device=queries.device)
        scores = torch.empty(heads, tokens, dtype=torch.float32, device=queries.device)
        factor = self._facts.scale * LOG2_E
        sizes = {**self._sizes, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.tokens, "num_warps": tiles.warps}
        self._look[heads, row_tiles](
            queries,
            lines,
            turns,
            lse if inv_freq is None else inv_freq,
            storage.tensor,
            storage.scales,
            pages,
            rows,
            lse,
            factor,
            tokens,
            count,
            queries.shape[1],
            heads,
            HEADS=self._heads,
            GROUP=group,
            HALF=0 if inv_freq is None else inv_freq.shape[0],
            **sizes,
        )
        self._score[heads, -(-tokens // tiles.tokens)](
            rows,
            lse,
            storage.tensor,
            storage.scales,
            pages,
            ends,
            scores,
            factor,
            tokens,
            count,
            padded,
            heads,
            len(ends),
            conclusion,
            **sizes,
        )
        return scores

    def _judge(self, pages: Tensor, lines: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        """`gate.squares` of one fold, `[L, 2]`."""
        storage, (queries, lse) = self._storage, self._queries.reserve()
        heads, group = len(counts), queries.shape[2] // self._heads
        tiles = _tiles(queries.dtype)
        out = torch.empty(self._layers, self._heads, 2, dtype=torch.float32, device=queries.device)
        self._squares[(heads,)](
            queries,
            lse,
            lines,
            self._windowed,
            storage.tensor,
            storage.scales,
            pages,
            indices,
            counts,
            out,
            self._facts.scale * LOG2_E,
            len(pages) * self._page_size,
            indices.shape[2],
            len(lines) * group,
            queries.shape[1],
            heads,
            HEADS=self._heads,
            GROUP=group,
            BLOCK_M=tiles.rows,
            BLOCK_N=JUDGED,
            num_warps=tiles.warps,
            **self._sizes,
        )
        return out.sum(1)


def _tiles(dtype: torch.dtype) -> _Tiles:
    return _Tiles(16, 32, 4) if dtype == torch.float32 else _Tiles(64, 64, 4)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which may be another one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
