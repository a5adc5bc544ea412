"""Filled memories in which one span is folded, by kernels and by their PyTorch twins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8, quantise
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.kv.summary import SummaryGrowth
from thinkfold.runner.attention_facts import AttentionFacts
from thinkfold.runner.folder import Folder
from thinkfold.runner.query_store import LINES, QueryStore
from thinkfold.runner.shard import WHOLE, OwnHeads
from thinkfold.runner.storage import KVStorage
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.scheduler.output import BatchRow, FoldCommit, FoldPrepare


class Case(NamedTuple):
    """`pages` of the span, which ends at position `end`; `computed` positions are there in all."""

    heads: int
    group: int
    dim: int
    page_size: int
    pages: int
    end: int
    computed: int
    weights: tuple[float, ...] = ()  # of the 2 · heads heads
    entries: int = 16
    turns: int = -1  # channels that positions turn, -1 all, 0 none
    ends: tuple[int, ...] = ()
    window: int = 0
    fp8: bool = False


CASES = [
    Case(2, 3, 16, 8, 5, 60, 90),
    Case(2, 1, 40, 16, 9, 160, 300, weights=(0.2, 1.9, 1.4, 0.5), entries=48, ends=(37, 150), turns=16),
    Case(1, 7, 64, 32, 3, 100, 400, turns=0, window=90),
    Case(1, 2, 16, 8, 6, 52, 53, entries=100),  # everything stays; one late position
    Case(2, 2, 32, 8, 6, 60, 50, weights=(0.0, 2.0, 1.0, 1.0), fp8=True),  # no late position
]
ONE_HEAD = CASES[0]._replace(heads=1)


@dataclass(frozen=True, slots=True)
class Memory:
    """What one fold reads and writes."""

    case: Case
    storage: KVStorage
    tables: SummaryTables
    queries: QueryStore
    facts: AttentionFacts

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Memory:
        """Two layers; slot 1 of three has queries, and summaries of 5 entries a head."""
        torch.manual_seed(seed)
        where = torch.device(device)
        layers, kv = 2, FP8 if case.fp8 else dtype
        pages = 3 * case.pages + 8
        storage = KVStorage(pages, layers, case.heads, case.page_size, case.dim, kv, where, bias=True)
        rows = torch.randn(storage.tensor.shape) * (1 + torch.rand(storage.tensor.shape[:-1]).unsqueeze(-1))
        if case.fp8:
            codes, scales = quantise(rows)
            storage.scales.copy_(scales)
            storage.tensor.view(torch.uint8).copy_(codes.view(torch.uint8))
        else:
            storage.tensor.copy_(rows)
        storage.bias.fill_(3.0)
        tables = SummaryTables(3, layers, case.heads, case.page_size, 2 * case.pages + 4, where)
        queries = QueryStore(3, layers, case.heads * case.group, case.dim, dtype, where)
        _, lines = queries.place([BatchRow(1, [0] * case.computed, False, 0, 0, [], keep_queries=True)])
        kept = torch.randn(layers, len(lines), case.heads * case.group, case.dim)
        lse = kept[..., 0].float() + 0.6 * case.dim**0.5 + 4.0
        queries.keep(torch.tensor(lines, device=where), kept.to(where, dtype), lse.to(where))
        half = (case.dim if case.turns < 0 else case.turns) // 2
        inv_freq = (1e4 ** -(torch.arange(half) / half)).to(where) if half else None
        windowed = torch.tensor([False, case.window > 0], device=where)
        facts = AttentionFacts(case.dim**-0.5, windowed, inv_freq, case.window)
        return cls(case, storage, tables, queries, facts)

    def folder(self, backend: str) -> Folder:
        case = self.case
        own = OwnHeads(WHOLE, 2, case.heads, 2 * case.heads)
        budgets = FoldBudgets(2, case.heads, case.weights)
        return Folder(self.storage, self.tables, self.queries, budgets, self.facts, own, backend)

    def prepare(self) -> FoldPrepare:
        case = self.case
        tokens = case.pages * case.page_size
        pages = [2 * page + 1 for page in reversed(range(case.pages))]
        ends = case.ends or (tokens - 3,)
        return FoldPrepare(7, 1, pages, case.end, ends, "conclusion_attention", case.entries)

    def commit(self, counts: list[int]) -> FoldCommit:
        """Behind 5 entries that are there: blocks of the pages behind the span's, in turn."""
        case = self.case
        heads, size = 2 * case.heads, case.page_size
        blocks = iter(range((2 * case.pages + 1) * heads, self.storage.num_pages * heads))
        first = [[next(blocks)] for _ in range(heads)]
        self.tables.set(1, first, [5] * heads)
        fresh = [[next(blocks) for _ in range(-(-(5 + count) // size) - 1)] for count in counts]
        return FoldCommit(7, 1, self.prepare().pages, SummaryGrowth(counts, [5] * heads, fresh))


def fold(memory: Memory, backend: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Indices `[heads, E]`, squares `[L, 2]`, and memory after the commit, all on the CPU."""
    folder = memory.folder(backend)
    squares = folder.prepare(memory.prepare(), None).cpu()
    waiting = folder._prepared[7]
    indices = waiting.summary.indices[0].flatten(0, 1).cpu()
    folder.commit(memory.commit(waiting.counts))
    raw = memory.storage.tensor
    planes = [raw.view(torch.uint8) if memory.case.fp8 else raw, memory.storage.scales, memory.storage.bias]
    return indices, squares, [plane.cpu() for plane in (*planes, memory.tables.table, memory.tables.lens)]


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """Kernels choose what their twins choose, but for scores that are nearly equal; what they write is the same."""
    mine, twin = (Memory.of(case, dtype, device) for _ in range(2))
    indices, squares, planes = fold(mine, "triton")
    expected, others, twin_planes = fold(twin, "reference")
    full = dtype == torch.float32
    assert indices.shape == expected.shape
    for chosen, other in zip(indices.tolist(), expected.tolist(), strict=True):
        assert chosen == [*sorted(i for i in chosen if i >= 0), *[-1] * chosen.count(-1)]
        changed = len(set(chosen) ^ set(other))
        assert changed <= (2 * (device != "cpu") if full else max(2, len(other) // 8)), f"{chosen} instead of {other}"
    rounding = (1e-3, 1e-6) if full else (0.1, 1e-4)
    assert ((squares - others).abs() <= rounding[0] * others + rounding[1] * others[:, 1:]).all(), (squares, others)
    if torch.equal(indices, expected):
        assert all(map(torch.equal, planes, twin_planes)), "memory differs"


def check_ties(device: str) -> None:
    """Keys of zeros and equal values draw the same: the newest stay, behind what stands before an end."""
    for end, expected in ((20, range(4, 20)), (10, [*range(10), *range(34, 40)])):
        memory = Memory.of(ONE_HEAD._replace(ends=(end,)), torch.float32, device)
        memory.storage.tensor[:, :, :, 0], memory.storage.tensor[:, :, :, 1] = 0.0, 1.0
        indices, _, _ = fold(memory, "triton")
        assert indices.tolist() == [list(expected)] * 2


def check_broken(device: str) -> None:
    """A key that is no number makes its layer's error none, and no other's."""
    memory = Memory.of(ONE_HEAD, torch.float32, device)
    memory.storage.tensor[memory.prepare().pages[2], 0, 0, 0, 3] = torch.nan
    folder = memory.folder("triton")
    assert folder.prepare(memory.prepare(), None).isnan().any(1).tolist() == [True, False]


def check_alone(device: str) -> None:
    """A fold has the same bits whatever other pages and slots hold."""
    first, other = (Memory.of(ONE_HEAD, torch.float32, device) for _ in range(2))
    span = first.prepare().pages
    rest = [page for page in range(other.storage.num_pages) if page not in span]
    other.storage.tensor[rest] += 1.0
    queries, lse = other.queries.reserve()
    queries[:, :LINES] = 5.0
    lse[:, 2 * LINES :] = 5.0
    for mine, same in zip(fold(first, "triton")[:2], fold(other, "triton")[:2], strict=True):
        assert torch.equal(mine, same)


def check_nothing(device: str) -> None:
    """To make the kernels leaves memory as it was."""
    memory = Memory.of(CASES[0], torch.float32, device)
    memory.tables.reserve()
    before = [tensor.clone() for tensor in (memory.storage.tensor, memory.storage.bias, memory.tables.table)]
    memory.folder("triton").make_kernels()
    assert all(map(torch.equal, before, (memory.storage.tensor, memory.storage.bias, memory.tables.table)))
