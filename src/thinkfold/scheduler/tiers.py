"""Whose turn it is among tiers, and how much memory a tier may hold. No torch, no clock but steps.

Turns follow weighted token counters (the virtual token counter of Sheng et al., OSDI 2024): the tier whose
tokens over its weight are fewest starts the next branch; who comes back from idling starts level with those
that worked meanwhile. Ageing bounds the wait whatever the weights are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.forks import counted_again
from thinkfold.scheduler.parking import Parking

PATIENCE = 1024  # steps that a tier is passed over at most


class TierShares:
    """Orders the waiting queue between tiers and holds each to its KV quota.

    A quota counts device pages of running, waiting and paused branches, those that siblings share once;
    pages shared with another request count for both. Probes count for nothing: they give way to everybody.
    """

    def __init__(
        self,
        kv: KVManager,
        running: list[Branch],
        waiting: deque[Branch],
        parking: Parking,
        admission: Admission | None,
    ) -> None:
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._parking = parking
        self._admission = admission
        self._served: dict[str, float] = {}  # tokens over weight
        self._active: set[str] = set()
        self._level = 0.0  # the fewest tokens over weight of those that worked last
        self._since: dict[str, int] = {}  # the step since which a waiting tier has started nobody
        self._step = 0
        self._turn: Branch | None = None  # keeps its turn until it has started

    def observe(self, step: int) -> None:
        """A step is about to be planned: take note of who has come and gone."""
        self._step = step
        waiting = {b.request.tier.name for b in self._waiting}
        active = waiting | {b.request.tier.name for b in self._running}
        if stayed := active & self._active:
            self._level = min(self._served[name] for name in stayed)
        for name in active - self._active:
            self._served[name] = max(self._served.get(name, 0.0), self._level)
        self._active = active
        self._since = {name: self._since.get(name, step) for name in waiting}

    def charge(self, branch: Branch, tokens: int) -> None:
        """`tokens` of the branch are launched."""
        tier = branch.request.tier
        self._served[tier.name] = self._served.get(tier.name, self._level) + tokens / tier.weight

    def started(self, branch: Branch) -> None:
        """The branch has got its turn."""
        self._turn = None
        self._since[branch.request.tier.name] = self._step

    def lead(self) -> bool:
        """Put the branch whose turn it is first in the queue; False if all who wait have their quota used up.

        Paused branches of a tier at its quota leave the device for it.
        """
        heads: dict[str, Branch] = {}
        for branch in self._waiting:
            heads.setdefault(branch.request.tier.name, branch)
        ready = [head for head in heads.values() if self._may_start(head)]
        if self._turn not in ready:
            self._turn = min(ready, key=self._rank, default=None)
        if self._turn is not None and self._waiting[0] is not self._turn:
            self._waiting.remove(self._turn)
            self._waiting.appendleft(self._turn)
        return self._turn is not None

    def bound(self, branch: Branch, count: int) -> int:
        """How many of the branch's next `count` tokens its tier's quota has room for; those of its last page count."""
        if branch.request.tier.kv_quota >= 1.0:
            return count
        needed = self._kv.pages_needed(branch.table, count)
        room = self._room(branch) if needed else None  # what a tier holds is a sum over all its branches
        if room is None or needed <= room:
            return count
        free = len(branch.table.pages) * self._kv.page_size - branch.table.kv_len
        return max(0, min(count, free + room * self._kv.page_size))

    def allows(self, branch: Branch, count: int) -> bool:
        """Whether the tier's quota has room for the branch's next `count` tokens."""
        if branch.request.tier.kv_quota >= 1.0:
            return True
        needed = self._kv.pages_needed(branch.table, count)
        return not needed or needed <= (self._room(branch) or 0)

    def rivals(self, branch: Branch) -> list[Branch]:
        """The running branches of its tier, by arrival."""
        return [b for b in self._running if b.request.tier.name == branch.request.tier.name]

    def answer_tokens(self, tier: str, share: float) -> int | None:
        """Tokens that `share` of the tier's answers did not exceed; None where nobody learns it or nothing is known."""
        return None if self._admission is None else self._admission.answer_tokens(tier, share)

    def held(self, tier: str) -> int:
        """Device pages of a tier."""
        groups = (self._running, self._waiting, self._parking.branches)
        mine = [b for group in groups for b in group if b.request.tier.name == tier]
        mine.sort(key=lambda b: b.request.request_id)
        return sum(self._pages(list(group)) for _, group in groupby(mine, key=lambda b: b.request.request_id))

    def _room(self, branch: Branch) -> int | None:
        """Pages that the branch's tier may take besides those it holds; None where it has no quota."""
        tier = branch.request.tier
        quota = tier.quota(self._kv.num_pages)
        return None if quota is None else quota - self.held(tier.name)

    def _pages(self, siblings: Sequence[Branch]) -> int:
        raw = sum(len(b.table.pages) for b in siblings)
        blocks = sum(sum(map(len, b.table.summary.blocks)) for b in siblings)
        return raw - counted_again(siblings) - (-blocks // self._kv.num_heads)

    def _rank(self, branch: Branch) -> tuple[bool, float, int]:
        tier = branch.request.tier.name
        since = self._since.get(tier, self._step)
        waited = self._step - since > PATIENCE
        return not waited, since if waited else self._served.get(tier, self._level), branch.order

    def _may_start(self, branch: Branch) -> bool:
        """Whether the tier's quota has room for the branch, for a page more of each, and for what is to come.

        The first of a tier may always start: what can never fit was refused.
        """
        room = self._room(branch)
        if room is None:
            return True
        tier, rivals, needed = branch.request.tier, self.rivals(branch), self._needed(branch)
        while room < needed + len(rivals):
            if not self._parking.reclaim(forget=not rivals, tier=tier.name, keep=branch):
                return not rivals and self.held(tier.name) <= len(branch.table.pages)
            room = self._room(branch) or 0
        quota = tier.quota(self._kv.num_pages) or 0
        return self._admission is None or self._admission.admits_within(branch, rivals, quota)

    def _needed(self, branch: Branch) -> int:
        """Pages that the branch does not hold yet and will once its known tokens are computed."""
        table = branch.table
        if not branch.num_computed_tokens:
            return self._kv.pages_for(len(branch.token_ids))
        if table.host is None:
            return self._kv.pages_needed(table, branch.num_remaining)
        blocks = sum(map(len, table.host.blocks))
        return len(table.host.pages) - (-blocks // self._kv.num_heads)
