"""Folding on the device: judge a span, keep the choice, write it behind the slot's earlier summaries.

It knows no branch and no page's owner; how entries are chosen is the business of `thinkfold.fold`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinkfold.attention import int4
from thinkfold.fold import gate, selectors
from thinkfold.fold.budgets import OWN, FoldBudgets
from thinkfold.fold.compaction import CONCLUSION, local_attention, rotate
from thinkfold.fold.segments import Entries, Segments, Summary
from thinkfold.runner.attention_facts import AttentionFacts
from thinkfold.runner.fold_kernels import FoldKernels
from thinkfold.runner.fold_queries import STAND_INS, FoldQueries
from thinkfold.runner.query_store import QueryStore
from thinkfold.runner.shard import OwnHeads
from thinkfold.runner.storage import KVStorage
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.runner.transfer import to_device
from thinkfold.scheduler.output import FoldCommit, FoldPrepare


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A summary that waits: what stays, how many entries that is in each head, and all of it where it is kept in 4
    bits, `[L * Hkv, blocks, block_bytes]`."""

    summary: Summary
    counts: list[int]
    packed: Tensor | None


class Folder:
    """Prepares and commits folds of one KV storage: of all heads, or of one rank's, in its own numbers.

    Everything is a function of the fold's own span and queries.
    """

    def __init__(
        self,
        storage: KVStorage,
        tables: SummaryTables,
        queries: QueryStore,
        budgets: FoldBudgets,
        facts: AttentionFacts,
        heads: OwnHeads,
        backend: str = "reference",
    ) -> None:
        """`backend` is reference (plain PyTorch) or triton, as for attention."""
        self._storage = storage
        self._tables = tables
        self._queries = queries
        self._budgets = budgets
        self._facts = facts
        self._own = heads
        self._kernels = FoldKernels(storage, tables, queries, facts) if backend == "triton" else None
        self._prepared: dict[int, _Prepared] = {}

    def make_kernels(self) -> None:
        """Compile what folds launch, if they launch kernels of ours."""
        if self._kernels is not None:
            self._kernels.make()

    def prepare(self, work: FoldPrepare, now: int | None) -> Tensor:
        """Choose what stays of a span and keep it under `fold_id`; the gate's squares of own heads, `[L, 2]`.

        `now` is the logical position that the slot computes next, None where that is not known.
        """
        with _products_of(self._storage.tensor):
            return self._prepare(work, now)

    def _prepare(self, work: FoldPrepare, now: int | None) -> Tensor:
        positions = self._queries.positions(work.slot, now)
        if positions and self._kernels is not None and self._is_plain(work):
            return self._launch(self._kernels, work, positions)
        (places,) = to_device([work.pages if work.blocks is None else work.blocks], self._storage.tensor.device)
        keys, values = (self._storage.read_span if work.blocks is None else self._storage.read_blocks)(places)
        layers, heads, tokens, _ = keys.shape
        counts = self._counts(work, tokens)
        chosen_by, judged_by = (
            self._segments(work, positions, keys, values) if positions else self._alone(work, keys, values)
        )
        if work.whole:
            counts = [tokens] * len(counts)
            summary = Summary(torch.arange(tokens, device=keys.device).expand(1, layers, heads, -1))
        else:
            options = {name: self._own.of(table) for name, table in self._budgets.options(work.selector).items()}
            selector = selectors.create(work.selector, **options)
            summary = selector.select(chosen_by, torch.tensor(counts).view(layers, heads))
        kept = counts if summary.pooled is not None or summary.indices.shape[-1] else [0] * len(counts)
        packed, entries = None, summary.entries(keys[None], values[None])
        if self._storage.layout is not None:
            packed, entries = in_blocks(entries, self._storage.layout)
        self._prepared[work.fold_id] = _Prepared(summary, kept, packed)
        return gate.squares(judged_by, entries)[0]

    def _is_plain(self, work: FoldPrepare) -> bool:
        """Whether a fold of raw pages keeps exact entries, as the selector that tables are made for chooses them."""
        own = work.selector == OWN and work.entries and not self._budgets.options(OWN)
        return bool(own) and not work.whole and work.blocks is None and self._storage.layout is None

    def _launch(self, kernels: FoldKernels, work: FoldPrepare, positions: list[int]) -> Tensor:
        counts = self._counts(work, len(work.pages) * self._tables.page_size)
        queries = FoldQueries.of(positions, work.end)
        summary, squares = kernels.prepare(work.slot, work.pages, queries, counts, work.ends, CONCLUSION)
        self._prepared[work.fold_id] = _Prepared(summary, counts, None)
        return squares

    def _counts(self, work: FoldPrepare, tokens: int) -> list[int]:
        """Entries of each own head."""
        return self._own.of(self._budgets.counts(work.entries, tokens, self._tables.page_size))

    def drop(self, fold_id: int) -> None:
        """Forget a prepared fold, if there is one."""
        self._prepared.pop(fold_id, None)

    def commit(self, work: FoldCommit) -> None:
        """Write a prepared fold into its head blocks and lengthen the slot's tables.

        Raises ValueError where the blocks are for another number of entries than were prepared.
        """
        prepared, growth = self._prepared.pop(work.fold_id), work.growth
        if growth.counts != prepared.counts:
            raise ValueError(f"fold {work.fold_id}: blocks for {growth.counts} entries, {prepared.counts} are prepared")
        if growth.copies:
            self._storage.copy_blocks([(source, target) for _, source, target in growth.copies])
        if work.table is None:
            self._tables.grow(work)
        else:
            self._tables.set(work.slot, *work.table)
        if not any(growth.counts):
            return
        if prepared.packed is None:
            self._write(work, prepared.summary)
        else:
            self._write_packed(work, prepared.packed)

    def _write(self, work: FoldCommit, summary: Summary) -> None:
        """Exact entries of each head first, then pooled ones with their β."""
        pools = summary.pooled is not None and summary.pooled.bias.shape[-1]  # else no head of this rank has one
        if self._kernels is not None and not pools:
            self._kernels.write(summary, work.slot, work.pages, work.growth.counts, work.growth.starts)
            return
        storage, growth, total = self._storage, work.growth, sum(work.growth.counts)
        counts, starts, pages = to_device([growth.counts, growth.starts, work.pages], storage.tensor.device)
        heads = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)
        numbers = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[heads]
        targets = self._tables.entry_ids(work.slot, heads, starts[heads] + numbers)
        indices = summary.indices[0].flatten(0, 1)
        if summary.pooled is None or not pools:
            storage.write(targets, storage.read(storage.token_ids(pages, heads, indices[heads, numbers])))
            return
        storage.need_bias()
        exact = (indices >= 0).sum(-1)[heads]  # [n], of each entry's head
        pooled = summary.pooled
        which = (numbers - exact).clamp(min=0, max=pooled.bias.shape[-1] - 1)
        keys, values, bias = (part[0].flatten(0, 1)[heads, which] for part in (pooled.keys, pooled.values, pooled.bias))
        stored = storage.encode(keys, values)
        if indices.shape[-1]:
            tokens = indices[heads, numbers.clamp(max=indices.shape[-1] - 1)].clamp(min=0)
            stored = stored.replaced(numbers < exact, storage.read(storage.token_ids(pages, heads, tokens)))
            bias = bias.masked_fill(numbers < exact, 0.0)
        storage.write(targets, stored, bias)

    def _write_packed(self, work: FoldCommit, packed: Tensor) -> None:
        """int4 blocks of each head as they were made; all are full, so that each goes to a fresh one."""
        new = work.growth.new_blocks
        places = [(head, number) for head, blocks in enumerate(new) for number in range(len(blocks))]
        blocks = [block for blocks in new for block in blocks]
        heads, numbers, targets = to_device([*zip(*places, strict=True), blocks], packed.device)
        self._storage.write_blocks(targets, packed[heads, numbers])

    def _segments(
        self, work: FoldPrepare, positions: list[int], keys: Tensor, values: Tensor
    ) -> tuple[Segments, Segments]:
        """The span as the selector sees it, and with the queries that are held out for the gate."""
        late, past, turns, apart = FoldQueries.of(positions, work.end)
        facts, raw = self._facts, (keys[None], values[None])
        rows, lse = self._rows(work.slot, positions, keys)  # of the past, then late ones
        group = rows.shape[3] // len(positions)
        first, held, known = (len(part) * group for part in (past, apart, late))
        judge = Segments(*raw, rows[..., -held:, :], lse[..., -held:], held // group, group, facts.scale)
        seen, seen_lse = rows[..., first : first + known, :], lse[..., first : first + known]
        if past and facts.inv_freq is not None:
            (shift,) = to_device([[turn for turn in turns for _ in range(group)]], keys.device)
            seen = torch.cat((seen, rotate(rows[..., :first, :], shift, facts.inv_freq)), 3)
        return Segments(*raw, seen, seen_lse, known // group, group, facts.scale, work.ends), judge

    def _alone(self, work: FoldPrepare, keys: Tensor, values: Tensor) -> tuple[Segments, Segments]:
        """Where no query was kept at all, the span's newest keys stand in for queries that see nothing but the span."""
        rows = keys[None, :, :, -STAND_INS:]
        _, lse = local_attention(rows, keys[None], self._facts.scale)
        raw, late, scale = (keys[None], values[None]), rows.shape[3], self._facts.scale
        stand_in = Segments(*raw, rows, lse, late=late, group=1, scale=scale, ends=work.ends)
        return stand_in, stand_in

    def _rows(self, slot: int, positions: list[int], keys: Tensor) -> tuple[Tensor, Tensor]:
        """Kept queries as rows `[1, L, Hkv, n · group, D]` and their LSE.

        A layer with a window does not see the span: its LSE is inf, so the span's share is 0.
        """
        queries, lse = self._queries.read(slot, positions)
        heads = keys.shape[1]
        rows = queries.to(keys.dtype).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        lses = lse.to(keys.dtype).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        if self._facts.window:
            lses = lses.masked_fill(self._facts.windowed[:, None, None], torch.inf)
        return rows[None], lses[None]


@contextmanager
def _products_of(memory: Tensor) -> Iterator[None]:
    """Products of fp32 on a GPU in TF32 where memory holds fewer bits than that: keys and queries lose nothing."""
    precision = torch.get_float32_matmul_precision()
    if memory.is_cuda and memory.dtype.itemsize <= torch.bfloat16.itemsize:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def in_blocks(entries: Entries, layout: int4.Layout) -> tuple[Tensor, Entries]:
    """Entries of one fold as int4 blocks `[L * Hkv, n, block_bytes]`, and as they read back: present ones first.

    In each head those fill whole blocks; behind them stand empty ones where another head has more.
    """
    size, absent = layout.page_size, entries.bias[0].flatten(0, 1) == -torch.inf  # [L * Hkv, E]
    order = absent.byte().argsort(dim=-1, stable=True)
    bias = entries.bias[0].flatten(0, 1).gather(-1, order)
    wide = order.unsqueeze(-1).expand(*order.shape, entries.keys.shape[-1])
    keys, values = (part[0].flatten(0, 1).gather(-2, wide) for part in (entries.keys, entries.values))
    short = -bias.shape[-1] % size
    keys, values = (pad(part, (0, 0, 0, short)) for part in (keys, values))
    bias = pad(bias, (0, short), value=-torch.inf)
    rows = [part.unflatten(1, (-1, size)).flatten(0, 1) for part in (keys, values)]
    blocks = int4.pack(rows[0], rows[1], bias.view(-1, size))
    back = int4.unpack(blocks, layout, keys.dtype)
    layers = entries.bias.shape[1:3]
    read = Entries(*(part.reshape(1, *layers, -1, *part.shape[2:]) for part in back))
    return blocks.view(len(bias), -1, blocks.shape[-1]), read
