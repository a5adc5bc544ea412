"""Cases 39, 41 and 45 where memory is smallest or on its way: copies that race, aborts in a swap, four pages."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from scripted import BARE_PROMPT, loop, make_engine
from test_scheduler_folds import Reader, make, thinker

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.table import PageTable
from thinkfold.kv.work import KVWork
from thinkfold.runner.storage import KVStorage
from thinkfold.scheduler.branch import BranchStatus
from thinkfold.types import FinishReason, FoldMode

PAGE = 4


@dataclass
class Step:
    """What a late device does: copies in the engine's order, then writes, then reads that must find the pattern."""

    number: int
    work: KVWork
    writes: list[tuple[int, float]] = field(default_factory=list)
    reads: list[tuple[int, float]] = field(default_factory=list)

    def execute(self, storage: KVStorage) -> None:
        if self.work.swap_out:
            storage.pages_out(self.work.swap_out)
        if self.work.copies:
            storage.copy_pages(self.work.copies)
        if self.work.swap_in:
            storage.pages_in(self.work.swap_in)
        for page, value in self.writes:
            storage.tensor[page] = value
        for page, value in self.reads:
            assert torch.all(storage.tensor[page] == value), f"step {self.number}: page {page} does not hold {value}"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_case_41_late_copies_never_meet_their_pages_next_user(lag: int) -> None:
    """32 branches leave for the host and return for 1,000 steps, while the device runs `lag` steps behind."""
    rng = random.Random(lag)
    kv = KVManager(60, PAGE, enable_prefix_caching=False, host_pages=80)
    storage = KVStorage(60, 1, 1, PAGE, 8, torch.float32, torch.device("cpu"), 80)
    tables: list[PageTable] = [PageTable() for _ in range(32)]
    values: list[list[float]] = [[] for _ in tables]  # of each branch's pages
    behind: deque[Step] = deque()
    fresh, moves = 0.0, 0
    for number in range(1000):
        step = Step(number, KVWork())
        for index in rng.sample(range(32), 32):
            table, held = tables[index], values[index]
            chance = rng.random()
            if table.swapped:
                if chance < 0.3 and kv.swap_in(table, 0):
                    moves += 1
                elif chance > 0.98:
                    kv.free(table)
                    held.clear()
            elif held and chance < 0.1 and kv.swap_out(table):
                moves += 1
            elif held and chance < 0.15:
                kv.free(table)
                held.clear()
            elif chance < 0.5 and kv.allocate(table, PAGE, PageClass.THINKING):
                fresh += 1.0
                table.kv_len += PAGE
                held.append(fresh)
                step.writes.append((table.pages[-1], fresh))
            if not table.swapped:
                step.reads += list(zip(table.pages, held, strict=True))
        step.work = kv.take_work()
        kv.launch_step(number)
        kv.check_integrity(tables)
        behind.append(step)
        if len(behind) > lag:
            done = behind.popleft()
            done.execute(storage)
            kv.finish_step(done.number)
    assert moves > 500
    for done in behind:
        done.execute(storage)
        kv.finish_step(done.number)
    for table in tables:
        kv.free(table)
    assert sum(kv.usage().values()) == kv.host_usage() == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_case_45_a_branch_that_ends_in_the_middle_of_its_swap_leaves_nothing_behind(depth: int, later: int) -> None:
    """Ended `later` steps after it was moved: the copy planned, under way, done. Twice, as two aborts would."""
    scheduler, runner = make(20, host_pages=200, seqs=5), Reader()
    branches = [thinker(i, 55, policy=FoldMode.OFF) for i in range(4)]
    for branch in branches:
        scheduler.add([branch])
    pending, swapped, since = [], None, 0
    for _ in range(2000):
        plan = scheduler.plan()
        if plan is not None:
            pending.append((plan, runner.launch(plan)))
        swapped = swapped or next((b for b in scheduler.waiting if b.table.swapped), None)
        if swapped is not None:
            if since == later:
                scheduler.finish(swapped)
                scheduler.finish(swapped)
            since += 1
        scheduler.check_integrity()
        if pending and (plan is None or len(pending) > depth):
            step, result = pending.pop(0)
            for (owner, wanted), token in zip(scheduler.collect(step.step), result.token_ids, strict=True):
                if wanted:
                    owner.token_ids.append(token)
                    owner.steering.outputs += 1
                    if owner.steering.outputs >= owner.steering.length:
                        scheduler.finish(owner)
        elif plan is None:
            break
    assert swapped is not None and all(b.status is BranchStatus.FINISHED for b in branches)
    assert all(len(b.output_ids) == 55 for b in branches if b is not swapped)
    assert scheduler.kv.host_usage() == 0
    assert sum(n for c, n in scheduler.kv.usage().items() if c != "cached") == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_case_39_four_pages_serve_what_fits_them(depth: int) -> None:
    engine = make_engine(depth=depth, num_pages=4)
    for i in range(6):
        engine.add(list(range(10 * i, 10 * i + 6)), request_id=str(i), token_of=loop("a"), max_tokens=10)
    engine.add(BARE_PROMPT[:2], request_id="small", token_of=loop("a"), max_tokens=3)
    engine.run()
    for i in range(6):
        assert (len(engine.one(str(i)).token_ids), engine.one(str(i)).finish_reason) == (10, FinishReason.LENGTH)
    assert engine.one("small").finish_reason is FinishReason.LENGTH
    assert engine.core.stats().kv_pages.held == 0
