"""Plans each step: one token budget, every branch catches up from `num_computed_tokens`.

There are no phases: prefill chunks, decode tokens and injected tokens are rows of one batch
(the rule is vLLM's). First come, first served; when pages run out the last arrived branch is
preempted and recomputed later. Knows neither text nor tensors.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.output import BatchRow, SampleRow, StepPlan
from thinkfold.types import Phase


@dataclass(slots=True)
class _Launched:
    """Whose rows and draws a launched step holds, in the order of its plan."""

    step: int
    rows: list[tuple[Branch, int]] = field(default_factory=list)  # (branch, tokens written up to)
    draws: list[tuple[Branch, int]] = field(default_factory=list)  # (branch, epoch)


class Scheduler:
    """Owns the waiting and running branches and asks `KVManager` for their memory."""

    def __init__(self, kv: KVManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._step = 0
        self._planned = _Launched(0)
        self._launched: deque[_Launched] = deque()
        self._in_plan: set[int] = set()  # ids of branches with a row or a draw in this plan
        self.ended: list[Branch] = []  # ended while planning: `steering.finish_reason` or `error` says why
        self.waiting: deque[Branch] = deque()
        self.running: list[Branch] = []  # by arrival
        self.num_preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0

    def add(self, branches: list[Branch]) -> None:
        """Queue a request's branches; those after the first wait for its prompt."""
        trunk, *children = branches
        trunk.children = children
        for child in children:
            child.status = BranchStatus.BEHIND_TRUNK
        self.waiting.append(trunk)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run until a step in flight is collected."""
        rows: list[BatchRow] = []
        budget = self._max_num_batched_tokens
        self._in_plan.clear()
        self._planned = _Launched(self._step)
        for branch in list(self.running):
            if budget == 0:
                break
            if branch.status is not BranchStatus.RUNNING:
                continue  # preempted for an earlier one
            row = self._continue(branch, budget)
            if row is not None:
                rows.append(row)
                budget -= row.num_tokens
        while budget > 0 and self.waiting and self._free_slots:
            row = self._admit(self.waiting[0], budget)
            if row is None:
                break
            rows.append(row)
            budget -= row.num_tokens
        if not rows:
            return None
        plan = StepPlan(self._step, rows, self.kv.take_copies())
        self.kv.launch_step(self._step)
        self._launched.append(self._planned)
        self._step += 1
        return plan

    def collect(self, step: int) -> list[tuple[Branch, bool]]:
        """`step` has finished: publish what it wrote, free what waited for it.

        Returns (branch, still wanted) for each drawn token, in the order of the plan.
        """
        launched = self._launched.popleft()
        assert launched.step == step, f"step {step} collected, {launched.step} expected"
        self.kv.finish_step(step)
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
        if branch.status is BranchStatus.RUNNING:
            self.running.remove(branch)
            self._release_slot(branch)
        elif branch.status is BranchStatus.WAITING:
            self.waiting.remove(branch)
        self.kv.free(branch.table)
        branch.drop_inflight()
        branch.status = BranchStatus.FINISHED
        self._release_children(branch)

    def branches(self) -> Iterator[Branch]:
        """All branches that hold or may hold memory."""
        yield from self.running
        yield from self.waiting

    def rewind(self, branch: Branch, position: int) -> None:
        """Compute the token at `position` (logical) again: its id has changed."""
        surplus = branch.num_computed_tokens - position
        if surplus > 0:
            branch.num_computed_tokens = position
            self.kv.rewind(branch.table, branch.table.kv_len - surplus)

    def _continue(self, branch: Branch, budget: int) -> BatchRow | None:
        """A row for a running branch, or None if it must wait."""
        if not self._steer(branch) or branch.num_remaining == 0:
            return None
        count = min(branch.num_remaining, budget)
        while not self.kv.allocate(branch.table, count, _page_class(branch)):
            if self.kv.num_available + self.kv.num_returning >= self.kv.pages_needed(branch.table, count):
                return None  # pages of a step in flight are on their way
            victim = self.running[-1]
            if id(victim) in self._in_plan:
                return None
            self._preempt(victim)
            if victim is branch:
                return None
        return self._row(branch, count)

    def _admit(self, branch: Branch, budget: int) -> BatchRow | None:
        """Move the first waiting branch to running if its tokens fit, else None."""
        if branch.inflight or not self._steer(branch):  # preempted a moment ago: its last token is still to come
            return None
        kv, known = self.kv, len(branch.token_ids)
        limit = min(branch.request.prompt.visible_len, known - 1)
        found = kv.match(branch.table, branch.request.namespace, branch.token_ids, limit)
        headroom = len(self.running) + min(2**branch.preemptions - 1, kv.num_pages)
        fits = kv.pages_needed(branch.table, known - found) + headroom <= kv.num_available
        count = min(known - found, budget)
        if not (fits or not self.running) or not kv.allocate(branch.table, count, PageClass.PROMPT):
            kv.free(branch.table)
            return None
        if branch.preemptions == 0:
            branch.cached_tokens = found
            self.prefix_queried_tokens += branch.num_prompt_tokens
            self.prefix_hit_tokens += found
        self.waiting.popleft()
        branch.num_computed_tokens = found
        self._run(branch)
        return self._row(branch, count)

    def _steer(self, branch: Branch) -> bool:
        """Ask the branch's control what comes next; False if nothing may be launched for it."""
        steering, wait = branch.steering, True
        try:
            if branch.inflight == 0 and (ids := steering.injection()):
                branch.token_ids += ids
                branch.stale_counts = True
            wait = steering.must_wait(branch.inflight) or _all_launched(branch)
            branch.ban_eos = steering.ban_eos(branch.inflight)
        except Exception as error:  # one request's control must not stop the others
            branch.error = error
        if branch.error is not None or steering.finish_reason is not None:
            self.ended.append(branch)
            return False
        return not wait

    def _run(self, branch: Branch) -> None:
        branch.status = BranchStatus.RUNNING
        branch.slot = self._free_slots.pop()
        branch.stale_counts = True
        insort(self.running, branch, key=lambda b: b.order)

    def _row(self, branch: Branch, count: int) -> BatchRow:
        start = branch.num_computed_tokens
        from_slot = start == len(branch.token_ids)
        row = BatchRow(
            slot=branch.slot,
            token_ids=[] if from_slot else branch.token_ids[start : start + count],
            from_slot=from_slot,
            position=start,
            kv_start=branch.table.kv_len,
            pages=branch.table.pages,
        )
        branch.num_computed_tokens += count
        branch.table.kv_len += count
        branch.recomputed_tokens += max(0, min(branch.num_computed_tokens, branch.highest_computed) - start)
        branch.highest_computed = max(branch.highest_computed, branch.num_computed_tokens)
        branch.computed_prompt_tokens += max(0, min(branch.num_computed_tokens, branch.num_prompt_tokens) - start)
        self._in_plan.add(id(branch))
        self._planned.rows.append((branch, branch.num_computed_tokens))
        draws = branch.num_remaining == 0
        if draws:
            self._draw(branch, row)
        if branch.children and branch.num_computed_tokens >= branch.num_prompt_tokens:
            self._fork(branch, row, draws and branch.num_computed_tokens == branch.num_prompt_tokens)
        return row

    def _draw(self, branch: Branch, row: BatchRow) -> None:
        row.samples.append(_sample_row(branch))
        self._planned.draws.append((branch, branch.epoch))
        branch.inflight += 1

    def _fork(self, trunk: Branch, row: BatchRow, draw: bool) -> None:
        """The prompt is computed: children share its pages and, with `draw`, its logits.

        Without `draw` (the trunk's row went past the prompt) a child computes the prompt's
        last token again. Children without a free slot queue like any other branch.
        """
        shared = trunk.num_prompt_tokens if draw else trunk.num_prompt_tokens - 1
        for child in trunk.waiting_children()[: len(self._free_slots)]:
            self.kv.fork(trunk.table, child.table, shared)
            child.num_computed_tokens = child.highest_computed = shared
            child.cached_tokens = shared
            child.ban_eos = trunk.ban_eos
            self._run(child)
            if draw:
                self._in_plan.add(id(child))
                self._draw(child, row)
        self._release_children(trunk)

    def _release_children(self, trunk: Branch) -> None:
        """Children that could not fork queue like any other branch."""
        for child in reversed(trunk.waiting_children()):
            child.status = BranchStatus.WAITING
            self.waiting.appendleft(child)
        trunk.children = []

    def _preempt(self, branch: Branch) -> None:
        """Take a branch off the device; its tokens are kept and recomputed later."""
        self.running.remove(branch)
        self._release_slot(branch)
        self.kv.free(branch.table)
        branch.num_computed_tokens = 0
        branch.preemptions += 1
        self.num_preemptions += 1
        branch.status = BranchStatus.WAITING
        self.waiting.appendleft(branch)

    def _release_slot(self, branch: Branch) -> None:
        self._free_slots.append(branch.slot)
        branch.slot = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, queues and memory agree."""
        slots = [b.slot for b in self.running]
        assert len(set(slots)) == len(slots), "two branches share a slot"
        assert not set(slots) & set(self._free_slots), "a free slot is in use"
        assert all(b.status is BranchStatus.RUNNING for b in self.running), "a running branch says it is not"
        assert all(b.status is BranchStatus.WAITING for b in self.waiting), "a waiting branch says it is not"
        assert all(not b.table.pages for b in self.waiting), "a waiting branch holds pages"
        for branch in self.running:
            assert branch.table.kv_len <= branch.num_computed_tokens, "more entries than tokens"
            assert branch.num_remaining >= 0, "more computed than known"
        self.kv.check_integrity(branch.table for branch in self.branches())


def _all_launched(branch: Branch) -> bool:
    """max_tokens is a count: the last token is known to be the last when it is launched."""
    drawn = len(branch.token_ids) + branch.inflight - branch.num_prompt_tokens
    limit = branch.request.sampling.max_tokens
    return branch.inflight > 0 and limit is not None and drawn >= limit


def _page_class(branch: Branch) -> PageClass:
    if branch.num_computed_tokens < branch.num_prompt_tokens:
        return PageClass.PROMPT
    return PageClass.THINKING if branch.steering.phase is Phase.THINKING else PageClass.ANSWER


def _sample_row(branch: Branch) -> SampleRow:
    sampling = branch.request.sampling
    position = len(branch.token_ids) + branch.inflight
    drawn = position - branch.num_prompt_tokens
    history = None
    if branch.stale_counts and _counts_matter(branch):
        history = (branch.token_ids[: branch.num_prompt_tokens], branch.output_ids)
        branch.stale_counts = False
    return SampleRow(
        slot=branch.slot,
        params=sampling,
        seed=sampling.seed or 0,
        branch=branch.index,
        position=position,
        ban_eos=branch.ban_eos,
        forced_token=sampling.forced_tokens[drawn] if drawn < len(sampling.forced_tokens) else None,
        history=history,
    )


def _counts_matter(branch: Branch) -> bool:
    sampling = branch.request.sampling
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )
