"""A branch driven through ModelRunner by hand: its pages, head blocks and folds as the scheduler would plan them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinkfold.kv.summary import SummaryGrowth, SummaryTable
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.output import BatchRow, FoldCommit, FoldPrepare, MemoryWork, SampleRow, StepPlan, StepResult
from thinkfold.types import SamplingParams

TOP = SamplingParams(temperature=0.0, logprobs=20)


class Places:
    """Pages and head blocks in a shuffled order, so that nothing is right by chance."""

    def __init__(self, runner: ModelRunner, page_size: int, seed: int = 0, *, host: bool = False) -> None:
        self.heads = runner.num_layers * runner.num_kv_heads
        self.page_blocks = runner.budgets.page_blocks or self.heads
        self.page_size = page_size
        self.rng = random.Random(seed)
        self.free = list(range(runner.host_pages if host else runner.num_pages))
        self.rng.shuffle(self.free)
        self._blocks: list[int] = []

    def page(self) -> int:
        return self.free.pop()

    def block(self) -> int:
        """A head block of any page that is lent out; any head may get it."""
        if len(self._blocks) < 4:
            pages = [self.page() for _ in range(4)]
            self._blocks += [page * self.page_blocks + i for page in pages for i in range(self.page_blocks)]
            self.rng.shuffle(self._blocks)
        return self._blocks.pop()


@dataclass
class Branch:
    """Tokens computed so far, stored entries, raw pages and summaries of one branch in one slot."""

    runner: ModelRunner
    places: Places
    slot: int = 0
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    kv_len: int = 0
    pages: list[int] = field(default_factory=list)
    summary: SummaryTable = field(default_factory=SummaryTable)
    masked: list[tuple[int, int, int]] = field(default_factory=list)  # (start, end, unseen from this position on)
    offsets: list[int] = field(default_factory=list)  # logical position of each raw entry
    shared: set[int] = field(default_factory=set)  # head blocks that somebody else holds too
    folds: int = 0
    first: int = 0

    def row(self, count: int) -> BatchRow:
        """The next `count` tokens of `ids`; one draw after them."""
        size = self.places.page_size
        while len(self.pages) * size < self.kv_len + count:
            self.pages.append(self.places.page())
        start = self.computed
        ids = self.ids[start : start + count]
        row = BatchRow(
            self.slot,
            ids,
            False,
            start,
            self.kv_len,
            list(self.pages),
            [SampleRow(self.slot, TOP, 0, 0, start + count)],
            keep_queries=True,
            queries_from=self.first,
        )
        self.offsets += range(start, start + count)
        self.computed += count
        self.kv_len += count
        return row

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Logical positions [start, end) of `count` raw pages from page index `first` on."""
        size = self.places.page_size
        return self.offsets[first * size], self.offsets[(first + count) * size - 1] + 1

    def prepare(self, first: int, count: int, selector: str, entries: int) -> FoldPrepare:
        self.folds += 1
        fold_id = self.slot * 1000 + self.folds
        _, end = self.span(first, count)
        return FoldPrepare(
            fold_id,
            self.slot,
            self.pages[first : first + count],
            end,
            (count * self.places.page_size,),
            selector,
            entries,
        )

    def commit(self, prepared: FoldPrepare, first: int) -> FoldCommit:
        """Drop the span's pages from the table and take head blocks for what stays."""
        size, count = self.places.page_size, len(prepared.pages)
        if prepared.selector == "drop":
            counts = [0] * self.places.heads
        else:
            counts = self.runner.budgets.counts(prepared.entries, count * size, size)
        table = self.summary
        if not table.blocks:
            table.blocks, table.lengths = [[] for _ in counts], [0] * len(counts)
        starts, fresh, copies = list(table.lengths), [], []
        for head, (number, start) in enumerate(zip(counts, starts, strict=True)):
            blocks = table.blocks[head]
            if number and start % size and blocks[-1] in self.shared:
                copies.append((head, blocks[-1], self.places.block()))
                blocks[-1] = copies[-1][2]
            missing = -(-(start + number) // size) - len(blocks)
            fresh.append([self.places.block() for _ in range(missing)])
            blocks += fresh[-1]
            table.lengths[head] += number
        start, end = self.span(first, count)
        self.masked.append((start, end, self.computed))
        pages = self.pages[first : first + count]
        del self.pages[first : first + count]
        del self.offsets[first * size : (first + count) * size]
        self.kv_len -= count * size
        return FoldCommit(prepared.fold_id, self.slot, pages, SummaryGrowth(counts, starts, fresh, copies))


def step(runner: ModelRunner, rows: Sequence[BatchRow], memory: MemoryWork | None = None) -> StepResult:
    result = runner.collect(runner.launch(StepPlan(0, list(rows), memory or MemoryWork())))
    runner._memory.check_integrity()
    return result


def feed(
    branch: Branch,
    count: int,
    chunks: Callable[[], int] = lambda: 7,
    others: Callable[[], list[BatchRow]] = list,
    memory: MemoryWork | None = None,
) -> dict[int, StepResult]:
    """Compute `count` more tokens in chunks; results by the number of tokens computed, the branch's row last."""
    results = {}
    end = branch.computed + count
    while branch.computed < end:
        row = branch.row(min(chunks(), end - branch.computed))
        results[branch.computed] = step(branch.runner, [*others(), row], memory)
        memory = None
    return results


def fold(branch: Branch, first: int, count: int, selector: str, entries: int) -> tuple[dict[int, StepResult], float]:
    """Prepare, compute five tokens, commit with the next; the next is computed too."""
    prepared = branch.prepare(first, count, selector, entries)
    done = feed(branch, 5, memory=MemoryWork(prepares=[prepared]))
    ((fold_id, error),) = done[min(done)].fold_errors
    assert fold_id == prepared.fold_id
    commit = branch.commit(prepared, first)
    return done | feed(branch, 3, lambda: 3, memory=MemoryWork(commits=[commit])), error


def expected(model: nn.Module, branch: Branch) -> Tensor:
    """Log-probs `[T, V]` of one full forward in which each folded span is masked from its commit on."""
    length = branch.computed
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    for start, end, since in branch.masked:
        visible[since:, start:end] = False
    mask = torch.zeros(length, length).masked_fill_(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(torch.tensor([branch.ids[:length]]), attention_mask=mask[None, None]).logits[0]
    return logits.log_softmax(-1)


def worst(results: dict[int, StepResult], reference: Tensor) -> float:
    """The largest difference of the 20 most likely tokens' log-probs, over all results."""
    gap = 0.0
    for computed, result in results.items():
        found = result.logprobs[-1]
        assert found is not None and result.token_ids[-1] == int(reference[computed - 1].argmax())
        gap = max(gap, *(abs(value - float(reference[computed - 1, token])) for token, value in found.top))
    return gap
