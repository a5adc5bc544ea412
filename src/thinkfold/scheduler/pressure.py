"""What gives way when pages run out, cheapest first. No torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from thinkfold.errors import CapacityError
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.folding import FoldDesk
from thinkfold.scheduler.parking import Parking
from thinkfold.scheduler.sides import SideRows


class PressureLadder:
    """Wins memory for a branch: fold, swap, preempt; it changes the scheduler's own lists.

    `taken` counts what was done, by rung. `planned` says where each branch with a row in the step
    being planned stood before it, by id: such a branch cannot give way in that step.
    """

    def __init__(
        self,
        kv: KVManager,
        folds: FoldDesk,
        running: list[Branch],
        waiting: deque[Branch],
        free_slots: list[int],
        ended: list[Branch],
    ) -> None:
        self._kv = kv
        self._folds = folds
        self._running = running
        self._waiting = waiting
        self._ended = ended
        self.taken: Counter[str] = Counter()
        self.parking = Parking(kv, folds, running, waiting, free_slots, self.taken)
        self.sides = SideRows(kv, self.parking)

    def make_room(self, branch: Branch, count: int, planned: Mapping[int, int], *, stuck: bool) -> bool:
        """Climb the pressure ladder by one rung for `branch`; True if it may ask for its pages again.

        Idle cached pages are gone already. Rungs: probes, what is parked, offload, quantise, fold, swap, preempt; with
        nobody left to give way, fold what the gate has refused; then the branch itself ends.
        """
        if self._kv.num_available + self._kv.num_returning >= self._kv.pages_needed(branch.table, count):
            return False  # pages of a step in flight are on their way
        if self.sides.drop("its memory was needed"):
            self.taken["probe"] += 1
            return True
        if self.parking.reclaim(forget=False):
            return True
        if self._folds.pressing:
            return False
        if self.fold(self._running, planned):
            return False
        if self.parking.reclaim(forget=True):
            return True
        victim = self._running[-1]
        if victim is branch and len(self._running) == 1:
            return self._alone(branch, planned, stuck=stuck)
        if id(victim) in planned or id(victim) in self._folds.changed or not self._kv.settled(victim.table):
            return False
        if self._swap_out(victim):
            return False
        self._preempt(victim)
        return victim is not branch

    def make_room_within(self, branch: Branch, rivals: Sequence[Branch], planned: Mapping[int, int]) -> bool:
        """The same where the KV quota of the branch's tier is used up: its `rivals` in it give way, nobody else."""
        tier = branch.request.tier
        if self.sides.drop(
            "its memory was needed", tier.name
        ):  # they count for nothing, but a page may be copied for one
            self.taken["probe"] += 1
            return True
        if self.parking.reclaim(forget=True, tier=tier.name, keep=branch):
            return True
        if self._folds.presses(rivals) or self.fold(rivals, planned):
            return False
        victim = rivals[-1]
        if victim is branch and len(rivals) == 1:
            if self.parking.reclaim(forget=True, tier=tier.name, keep=branch, head=True):
                return True
            if self._kv.has_work:
                return False  # what is parked may be on its way in or out
            if self._folds.press(rivals, planned, force=True):
                self.taken["fold_forced"] += 1
            else:
                pages = tier.quota(self._kv.num_pages)
                branch.error = CapacityError("max_tokens", f"the quota of {pages} pages of tier {tier.name!r} is full")
                self._ended.append(branch)
            return False
        if id(victim) in planned or id(victim) in self._folds.changed or not self._kv.settled(victim.table):
            return False
        self.taken["quota"] += 1
        if not self._swap_out(victim):
            self._preempt(victim)
        return victim is not branch

    def _alone(self, branch: Branch, planned: Mapping[int, int], *, stuck: bool) -> bool:
        """The only running branch finds no memory: its last ways out."""
        if not stuck:
            return False  # what is under way may bring some
        if self.parking.reclaim(forget=True, head=True):
            return True
        if self._folds.press([branch], planned, force=True):
            self.taken["fold_forced"] += 1
        else:
            held, pages = sum(self._kv.usage().values()), self._kv.num_pages
            branch.error = CapacityError("max_tokens", f"the KV pool of {pages} pages is full: {held} held")
            self._ended.append(branch)
        return False

    def watch(self, planned: Mapping[int, int]) -> None:
        """Fold ahead of need, so that nobody waits for pages: every running branch may want one soon."""
        if self._kv.num_available + self._kv.num_returning < 2 * len(self._running) and not self._folds.pressing:
            self.fold(self._running, planned)

    def fold(self, branches: Sequence[Branch], planned: Mapping[int, int]) -> bool:
        """Win memory and force nobody out: the thinking of an answer leaves for the host, or a segment is compacted."""
        if self._folds.offload(branches, planned):
            self.taken["offload"] += 1
            return True
        rung = self._folds.press(branches, planned)
        if rung is not None:
            self.taken[rung] += 1
        return rung is not None

    def _preempt(self, branch: Branch) -> None:
        """Take a branch off the device; its tokens are kept and recomputed later."""
        self._leave(branch)
        self.taken["preempt"] += 1
        self.parking.forget(branch)

    def _swap_out(self, branch: Branch) -> bool:
        """Move a running branch to the host; False if the host has no room for it."""
        if not self._kv.host_pages or not self._kv.swap_out(branch.table):
            return False
        self.parking.store_queries(branch)
        self._leave(branch)
        self.taken["swap"] += 1
        self.parking.count_swap(branch)
        return True

    def _leave(self, branch: Branch) -> None:
        """A running branch gives way: it is first in the queue to come back."""
        self._running.remove(branch)
        self.parking.release_slot(branch)
        branch.preemptions += 1
        branch.status = BranchStatus.WAITING
        self._waiting.appendleft(branch)
