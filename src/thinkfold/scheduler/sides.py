"""Rows on the side: branches that ask something of another one's state and leave nothing behind. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.parking import Parking


class SideRows:
    """Side branches get what is left of a step's token budget, a slot that nobody waits for and free pages.

    Whatever they lack ends them: `dropped` are those that nobody has taken note of yet.
    """

    def __init__(self, kv: KVManager, parking: Parking) -> None:
        self._kv = kv
        self._parking = parking
        self.branches: list[Branch] = []
        self.dropped: list[tuple[Branch, str]] = []

    def __iter__(self) -> Iterator[Branch]:
        return iter(list(self.branches))

    def add(self, side: Branch) -> None:
        """A branch that has forked; it runs from the next step on."""
        side.status = BranchStatus.SIDE
        self.branches.append(side)

    def drop(self, why: str, tier: str | None = None) -> bool:
        """Somebody needs what they hold: all of them, or all of a tier, end. False if there are none."""
        sides = [side for side in self.branches if tier in (None, side.request.tier.name)]
        for side in sides:
            self.drop_one(side, why)
        return bool(sides)

    def drop_one(self, side: Branch, why: str) -> None:
        """This one cannot go on."""
        self.end(side)
        self.dropped.append((side, why))

    def end(self, side: Branch) -> None:
        """It has told what it was asked."""
        self.branches.remove(side)
        self._release(side)

    def _release(self, side: Branch) -> None:
        if side.slot >= 0:
            self._parking.release_slot(side)
        self._kv.free(side.table)
        side.drop_inflight()
        side.status = BranchStatus.FINISHED
