"""Plans each step: one token budget, every branch catches up from `num_computed_tokens`.

There are no phases: prefill chunks, decode tokens and injected tokens are rows of one batch
(the rule is vLLM's). First come, first served. When pages run out: fold closed thinking, then swap
the last arrived branch to the host, then preempt it and compute it again later. Knows neither text
nor tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.summary import SummaryTable
from thinkfold.scheduler.admission import Admission, entries_to_come
from thinkfold.scheduler.ahead import PrefillAhead
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.draws import all_launched, batch_row, page_class, sample_row
from thinkfold.scheduler.folding import FoldCounts, FoldDesk
from thinkfold.scheduler.forks import share
from thinkfold.scheduler.integrity import check_lists
from thinkfold.scheduler.launched import Launched
from thinkfold.scheduler.output import BatchRow, StepPlan
from thinkfold.scheduler.pressure import PressureLadder
from thinkfold.scheduler.tiers import TierShares
from thinkfold.scheduler.twins import had_better_wait
from thinkfold.types import FinishReason


class Scheduler:
    """Owns the waiting and running branches and asks `KVManager` for their memory."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        fold_counts: FoldCounts | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`fold_counts(entries, tokens)` are the entries of each head that a fold keeps; None keeps nothing of any.

        Without `admission` a branch starts as soon as its known tokens fit.
        """
        self.kv = kv
        self.folds = FoldDesk(kv, fold_counts or (lambda entries, tokens: [0] * kv.num_heads))
        self._admission = admission
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._step = 0
        self._planned = Launched(0)
        self._launched: deque[Launched] = deque()
        self._stuck = False
        self._turn = 0  # the order from which running branches get their rows
        self._in_plan: dict[int, int] = {}  # position before its row or draw in this plan, by a branch's id
        self.ended: list[Branch] = []  # ended while planning: `steering.finish_reason` or `error` says why
        self.waiting: deque[Branch] = deque()
        self.running: list[Branch] = []  # by arrival
        self._ladder = PressureLadder(kv, self.folds, self.running, self.waiting, self._free_slots, self.ended)
        self.parking, self.sides = self._ladder.parking, self._ladder.sides
        self.ahead = PrefillAhead(kv)
        self.tiers = TierShares(kv, self.running, self.waiting, self.parking, admission)
        self._short = False  # the branch that was to be admitted found no memory
        self._used_slots: set[int] = set()  # slots that may hold a former branch's summaries and queries
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def pressure(self) -> Counter[str]:
        """What was done for want of memory, by rung of the ladder."""
        return self._ladder.taken

    @property
    def num_preemptions(self) -> int:
        """Branches that had to leave the device: swapped or preempted."""
        return self._ladder.taken["swap"] + self._ladder.taken["preempt"]

    def add(self, branches: list[Branch]) -> None:
        """Queue a request's branches; those after the first wait for its prompt."""
        trunk, *children = branches
        trunk.children = children
        for child in children:
            child.status = BranchStatus.BEHIND_TRUNK
        self.waiting.append(trunk)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run until a step in flight is collected."""
        rows = self._rows()
        if not (rows or self._has_work or self._launched) and self.running:
            self._stuck = True  # nothing will change by itself: who waits for memory must do without
            rows, self._stuck = self._rows(), False
        if not (rows or self._has_work):
            return None
        plan = StepPlan(self._step, rows, self.folds.take())
        self._planned.commits = plan.memory.commits
        self.kv.launch_step(self._step)
        self._launched.append(self._planned)
        self._step += 1
        return plan

    @property
    def _has_work(self) -> bool:
        return bool(self.kv.has_work or self.folds.has_work)

    def _rows(self) -> list[BatchRow]:
        """Rows of running branches in order of arrival, then of waiting ones, within the token budget."""
        rows: list[BatchRow] = []
        budget = self._max_num_batched_tokens
        self._in_plan.clear()
        self._planned = Launched(self._step)
        self._ladder.watch(self._in_plan)
        self.tiers.observe(self._step)
        turn, self._turn = self._turn, 0
        first = bisect_left(self.running, turn, key=lambda b: b.order) if turn else 0
        for branch in self.running[first:] + self.running[:first]:
            if budget == 0:
                self._turn = branch.order  # who finds nothing left comes first in the next step
                break
            if branch.status is not BranchStatus.RUNNING:
                continue  # preempted for an earlier one
            if (row := self._continue(branch, budget)) is not None:
                rows.append(row)
                budget -= row.num_tokens
        if self.waiting and not self._free_slots:
            self.sides.drop("its place in the batch was needed")
        while budget > 0 and self.waiting and self._free_slots and self.tiers.lead():
            self._short = False
            row = self._admit(self.waiting[0], budget)
            if row is None:
                if self._short and not self.kv.num_returning and self.parking.reclaim(forget=not self.running):
                    continue
                break
            rows.append(row)
            budget -= row.num_tokens
        for side in self.sides:
            if (row := self._side_row(side, budget)) is not None:
                rows.append(row)
                budget -= row.num_tokens
        idle = not (rows or self.running or self.waiting)
        row = self.ahead.row(self._step, budget, self._claim_slot if self._free_slots else None, idle=idle)
        return rows if row is None else [*rows, row]

    def _side_row(self, side: Branch, budget: int) -> BatchRow | None:
        """A row of a probe, from what nobody else wants."""
        if budget == 0 or not self._steer(side) or (side.num_remaining == 0 and side.inflight):
            return None
        if side.slot < 0 and not self._free_slots:
            self.sides.drop_one(side, "no place in the batch was free")
            return None
        count = max(1, min(side.num_remaining, budget))
        if not self.kv.allocate(side.table, count, PageClass.THINKING):
            self.sides.drop_one(side, "no memory was free")
            return None
        if side.slot < 0:
            self._take_slot(side)
        return self._row(side, count)

    def collect(self, step: int) -> list[tuple[Branch, bool]]:
        """`step` has finished: publish what it wrote, free what waited for it.

        Returns (branch, still wanted) for each drawn token, in the order of the plan.
        """
        launched = self._launched.popleft()
        assert launched.step == step, f"step {step} collected, {launched.step} expected"
        self.kv.finish_step(step)
        self.folds.written(launched.commits)
        self._free_slots += self.ahead.collect(step)
        for branch, written in launched.rows:
            if branch.status is BranchStatus.RUNNING and branch.num_computed_tokens >= written:
                request = branch.request
                visible = min(written, request.prompt.visible_len)
                self.kv.publish(branch.table, request.namespace, branch.token_ids, visible)
        draws = []
        for branch, epoch in launched.draws:
            wanted = branch.status is not BranchStatus.FINISHED and branch.epoch == epoch
            branch.inflight -= wanted
            draws.append((branch, wanted))
        return draws

    def finish(self, branch: Branch) -> None:
        """Remove a branch for good and return its memory. Children of a trunk go on alone."""
        if self._admission is not None and branch.steering.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._admission.learn(branch, [b for b in self.running if b is not branch])
        if branch.status is BranchStatus.RUNNING:
            self.running.remove(branch)
            self.parking.release_slot(branch)
        elif branch.status is BranchStatus.WAITING:
            self.waiting.remove(branch)
        elif branch.status is BranchStatus.PAUSED:
            self.parking.remove(branch)
        self.folds.forget(branch)
        self.parking.drop_queries(branch)
        self.kv.free(branch.table)
        branch.drop_inflight()
        branch.status = BranchStatus.FINISHED
        self._release_children(branch)

    def branches(self) -> Iterator[Branch]:
        """All branches that hold or may hold memory."""
        yield from (*self.running, *self.waiting, *self.parking.branches, *self.sides)

    def fork_side(self, parent: Branch, side: Branch, *, redo: bool) -> None:
        """Let a probe start from all tokens of `parent` that are known; `redo`: it asks for the last one's logits."""
        share(self.kv, parent, side, len(parent.token_ids), redo=redo)
        self.sides.add(side)

    def settle(self, branch: Branch) -> None:
        """Forget what is in flight of a branch that waits for it: its next draw is that one again."""
        if branch.inflight:
            branch.drop_inflight()
            self.rewind(branch, len(branch.token_ids) - 1)

    def pause(self, branch: Branch) -> None:
        """Stop a branch, with what it holds, until `resume`. One behind its trunk goes on alone."""
        self.settle(branch)
        if branch.status is BranchStatus.BEHIND_TRUNK:
            for trunk in self.branches():
                trunk.children = [child for child in trunk.children if child is not branch]
        self.parking.pause(branch)

    def resume(self, branch: Branch) -> None:
        """The paused branch is first in the queue to run again."""
        self.parking.resume(branch)

    def rewind(self, branch: Branch, position: int) -> None:
        """Compute the token at `position` (logical) again: its id has changed."""
        surplus = branch.num_computed_tokens - position
        if surplus > 0:
            branch.num_computed_tokens = position
            self.kv.rewind(branch.table, branch.table.kv_len - surplus)

    def _continue(self, branch: Branch, budget: int) -> BatchRow | None:
        """A row for a running branch, or None if it must wait."""
        if not self.folds.advance(branch, stuck=self._stuck):
            return None
        if not self._steer(branch) or (branch.num_remaining == 0 and branch.inflight):
            return None
        count = max(1, self._row_length(branch, budget))
        while not self.tiers.allows(branch, count):
            if not self._ladder.make_room_within(branch, self.tiers.rivals(branch), self._in_plan):
                return None
        while not self.kv.allocate(branch.table, count, page_class(branch)):
            if not self._ladder.make_room(branch, count, self._in_plan, stuck=self._stuck):
                return None
        return self._row(branch, count)

    def _row_length(self, branch: Branch, budget: int) -> int:
        """Tokens of the branch's next row: a row ends where a fold is due."""
        count = self.tiers.bound(branch, min(branch.num_remaining, budget))
        event = branch.folding.next_event(branch.num_computed_tokens) if branch.folding and count > 1 else None
        return count if event is None else min(count, event - branch.num_computed_tokens)

    def _admit(self, branch: Branch, budget: int) -> BatchRow | None:
        """Move the first waiting branch to running if its tokens fit, else None."""
        if branch.inflight or not self._steer(branch):  # preempted a moment ago: its last token is still to come
            return None
        if self._admission is not None and not self._admission.admits(branch, self.running, self.kv.usage()):
            return None
        if not (branch.num_computed_tokens or self._stuck) and had_better_wait(branch, self.running, self.kv):
            return None
        row = self._readmit(branch, budget) if branch.num_computed_tokens else self._start(branch, budget)
        if branch.status is BranchStatus.WAITING and not self.folds.pressing:
            givers = [b for b in self.running if b.folding is not None and b.folding.policy.prefer == "fold"]
            self._ladder.fold(givers, self._in_plan)
        return row

    def _start(self, branch: Branch, budget: int) -> BatchRow | None:
        """Run a branch from its prompt on."""
        kv, limit = self.kv, min(branch.request.prompt.visible_len, len(branch.token_ids) - 1)
        found = kv.match(branch.table, branch.request.namespace, branch.token_ids, limit)
        needed = kv.pages_needed(branch.table, entries_to_come(branch) - found) + self._headroom(branch)
        branch.num_computed_tokens = found
        self.folds.advance(branch, stuck=False)  # what it has thought before a preemption
        count = self._row_length(branch, budget)
        if not self.running:  # what has been folded before may be more than the pool holds raw
            count = max(1, min(count, kv.num_available * kv.page_size))
        fits = needed <= kv.num_available or not self.running
        if not fits or not kv.allocate(branch.table, count, PageClass.PROMPT):
            branch.num_computed_tokens = 0
            kv.free(branch.table)
            self._short = True
            return None
        if branch.highest_computed == 0:
            branch.cached_tokens = found
            self.prefix_queried_tokens += branch.num_prompt_tokens
            self.prefix_hit_tokens += found
        self.waiting.popleft()
        self._run(branch)
        return self._row(branch, count)

    def _readmit(self, branch: Branch, budget: int) -> BatchRow | None:
        """Let a branch go on where it stopped; bring it back from the host if it is there."""
        if branch.table.swapped:
            if not self.kv.swap_in(branch.table, self._headroom(branch) if self.running else 0):
                self._short = True
                return None
            self.parking.count_swap(branch)
        self.waiting.popleft()
        self._run(branch)
        self.parking.restore_queries(branch)
        return self._continue(branch, budget)

    def _headroom(self, branch: Branch) -> int:
        """Pages to leave to others; more after each time that the branch had to give way."""
        return len(self.running) + min(2**branch.preemptions - 1, self.kv.num_pages)

    def _steer(self, branch: Branch) -> bool:
        """Ask the branch's control what comes next; False if nothing may be launched for it."""
        steering, wait = branch.steering, True
        try:
            if branch.inflight == 0 and (ids := steering.injection()):
                branch.token_ids += ids
                branch.stale_counts = True
            wait = steering.must_wait(branch.inflight) or all_launched(branch)
            branch.ban_eos = steering.ban_eos(branch.inflight)
            branch.allowed = None if wait else steering.allowed()
        except Exception as error:  # one request's control must not stop the others
            branch.error = error
        if branch.error is not None or steering.finish_reason is not None:
            self.ended.append(branch)
            return False
        return not wait

    def _run(self, branch: Branch) -> None:
        branch.status = BranchStatus.RUNNING
        self.tiers.started(branch)
        self._take_slot(branch)
        insort(self.running, branch, key=lambda b: b.order)

    def _take_slot(self, branch: Branch) -> None:
        branch.slot = self._claim_slot(branch.table.summary, folds=branch.folding is not None)
        branch.stale_counts = True

    def _claim_slot(self, summary: SummaryTable | None = None, *, folds: bool = False) -> int:
        slot, held = self._free_slots.pop(), summary or SummaryTable()
        if folds or held.lengths or slot in self._used_slots:
            self.folds.work.summaries.append((slot, held.blocks, held.lengths))
            self._used_slots.add(slot)
        return slot

    def _row(self, branch: Branch, count: int) -> BatchRow:
        start = branch.num_computed_tokens
        if branch.num_remaining == 0:  # forked behind a fold: its last token's logits, its entries are there already
            row = batch_row(branch, start - 1, 1)
        else:
            row = batch_row(branch, start, count)
            branch.advance(count)
        self.tiers.charge(branch, count)
        self._in_plan[id(branch)] = start
        self._planned.rows.append((branch, branch.num_computed_tokens))
        draws = branch.num_remaining == 0
        if draws:
            self._draw(branch, row)
        if branch.children and branch.num_computed_tokens >= branch.num_prompt_tokens:
            self._fork(branch, row, draws and branch.num_computed_tokens == branch.num_prompt_tokens)
        return row

    def _draw(self, branch: Branch, row: BatchRow) -> None:
        row.samples.append(sample_row(branch))
        self._planned.draws.append((branch, branch.epoch))
        branch.inflight += 1

    def _fork(self, trunk: Branch, row: BatchRow, draw: bool) -> None:
        """The prompt is computed: children share its pages and, with `draw`, its logits.

        Without `draw` (the trunk's row went past the prompt) a child computes the prompt's last token again, one
        with injected tokens computes those. Children without a free slot queue like any other branch.
        """
        for child in trunk.waiting_children()[: len(self._free_slots)]:
            fresh = not child.output_ids
            shared = trunk.num_prompt_tokens - (fresh and not draw)
            self.kv.fork(trunk.table, child.table, shared)
            child.num_computed_tokens = child.highest_computed = shared
            child.cached_tokens = shared
            child.ban_eos, child.allowed = trunk.ban_eos, trunk.allowed
            self._run(child)
            if child.folding is not None:
                self.folds.work.forks.append((trunk.slot, child.slot))
            self._in_plan[id(child)] = shared  # the trunk's row has yet to write what it holds
            if draw and fresh:
                self._draw(child, row)
        self._release_children(trunk)

    def _release_children(self, trunk: Branch) -> None:
        """Children that could not fork queue like any other branch."""
        for child in reversed(trunk.waiting_children()):
            child.status = BranchStatus.WAITING
            self.waiting.appendleft(child)
        trunk.children = []

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, queues and memory agree."""
        check_lists(self.running, self.waiting, self.parking.branches)
        slots = [b.slot for b in (*self.running, *self.sides) if b.slot >= 0] + self.ahead.slots()
        assert sorted(slots + self._free_slots) == list(range(len(slots) + len(self._free_slots))), "slots are lost"
        self.kv.check_integrity([*(b.table for b in self.branches()), *self.ahead.tables()])
