"""Branches that hold memory and do not run: paused ones, and those that only handles keep. No torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.folding import FoldDesk


class Parking:
    """Takes branches out of the scheduler's lists and puts them back; what they hold is the first to give way.

    A parked branch keeps its pages on the device until somebody needs them. Then it moves to the
    host, or, without room there, is forgotten and computed again. It changes the scheduler's own
    lists; `taken` counts what was done, by rung of the pressure ladder.
    """

    def __init__(
        self,
        kv: KVManager,
        folds: FoldDesk,
        running: list[Branch],
        waiting: deque[Branch],
        free_slots: list[int],
        taken: Counter[str],
    ) -> None:
        self._kv = kv
        self._folds = folds
        self._running = running
        self._waiting = waiting
        self._free_slots = free_slots
        self._taken = taken
        self.branches: list[Branch] = []

    def pause(self, branch: Branch) -> None:
        """Take a branch without tokens in flight out of the batch or the queue."""
        assert branch.inflight == 0, "a paused branch has nothing in flight"
        if branch.status is BranchStatus.RUNNING:
            self._folds.withdraw(branch)
            self._running.remove(branch)
            self.store_queries(branch)
            self.release_slot(branch)
        elif branch.status is BranchStatus.WAITING:
            self._waiting.remove(branch)
        self.keep(branch)

    def keep(self, branch: Branch) -> None:
        """Hold a branch that is in no list."""
        branch.status = BranchStatus.PAUSED
        self.branches.append(branch)

    def resume(self, branch: Branch) -> None:
        """The branch is first in the queue to run again."""
        self.remove(branch)
        branch.status = BranchStatus.WAITING
        self._waiting.appendleft(branch)

    def remove(self, branch: Branch) -> None:
        """Forget a branch; its memory is the caller's."""
        self.branches.remove(branch)

    def reclaim(self, *, forget: bool, tier: str | None = None, keep: Branch | None = None, head: bool = False) -> bool:
        """Win memory from the branch that was parked last; False if nothing is won.

        What a copy to the host frees is there when the step has finished. `forget`: where the host has
        no room, drop its KV. `tier`: only from branches of that one, and not from `keep`. `head`: from the first
        in the queue, too, which is about to use its own.
        """
        for branch in self._holders(head):
            if branch is keep or tier not in (None, branch.request.tier.name) or not self._kv.settled(branch.table):
                continue
            if self._kv.host_pages and self._kv.swap_out(branch.table):
                self._taken["swap_parked"] += 1
                self.count_swap(branch)
                return True
            if forget:
                self._taken["forget_parked"] += 1
                self.forget(branch)
                return True
        return False

    def forget(self, branch: Branch) -> None:
        """Drop a branch's KV; its tokens are kept and computed again later."""
        self._folds.forget(branch)
        self.drop_queries(branch)
        self._kv.free(branch.table)
        branch.num_computed_tokens = 0
        if branch.folding is not None:
            branch.folding.restart()

    def count_swap(self, branch: Branch) -> None:
        """The branch's memory went to the host or came back."""
        table = branch.table
        blocks = sum(map(self._kv.pages_for, table.summary.lengths))
        branch.swapped_pages += self._kv.pages_for(table.kv_len) + blocks / self._kv.num_heads

    def release_slot(self, branch: Branch) -> None:
        """The branch's place in the runner's state is free."""
        self._free_slots.append(branch.slot)
        branch.slot = -1

    def store_queries(self, branch: Branch) -> None:
        """The branch leaves its slot: the queries that judge its folds wait under its order."""
        work, back = self._folds.work, (branch.order, branch.slot)
        if back in work.queries_in:  # the step being planned was to bring them: they have never come
            work.queries_in.remove(back)
        else:
            work.queries_out.append((branch.slot, branch.order))
        branch.stored = True

    def restore_queries(self, branch: Branch) -> None:
        """Bring them back to the slot that the branch has now."""
        if branch.stored:
            self._folds.work.queries_in.append((branch.order, branch.slot))
            branch.stored = False

    def copy_queries(self, source: Branch, target: Branch) -> None:
        """`target`, which has no slot, gets the queries of `source` under its own order."""
        work = self._folds.work
        away = source.stored or (source.order, source.slot) in work.queries_in
        if source.slot >= 0 and not away:
            work.queries_kept.append((source.slot, target.order))
        elif away:
            work.queries_shared.append((source.order, target.order))
        target.stored = source.slot >= 0 or source.stored

    def drop_queries(self, branch: Branch) -> None:
        """Nobody will ask for them again."""
        if branch.stored:
            self._folds.work.queries_dropped.append(branch.order)
            branch.stored = False

    def _holders(self, head: bool) -> Iterator[Branch]:
        """Who holds device pages without a slot."""
        yield from (b for b in reversed(self.branches) if b.table.pages)
        yield from (b for b in reversed(self._waiting) if b.table.pages and (head or b is not self._waiting[0]))
