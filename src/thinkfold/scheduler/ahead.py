"""Prefixes that are computed before anybody asks for them. No torch.

They draw nothing and hold nothing between two steps: what a step has written belongs to the prefix
tree, which is where the next step goes on, so there is nothing to take away when others need it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.radix import Namespace
from thinkfold.kv.table import PageTable
from thinkfold.scheduler.output import BatchRow

CHUNK = 256  # tokens a step: all that a request waits for which comes meanwhile


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens, whole pages of them, that are to be in the prefix tree.

    `idle`: compute them only in steps that have no other row, and in memory that nobody has pinned.
    """

    name: str
    namespace: Namespace
    token_ids: tuple[int, ...]
    idle: bool
    session: str = ""
    computed: int = 0  # tokens that went through the model for it
    dropped: str | None = None  # why it was given up
    forgotten: bool = False  # what is still being written for it is not to be shared
    table: PageTable = field(default_factory=PageTable)  # at its end, until it is taken note of: where it is


@dataclass(slots=True)
class _Flight:
    step: int
    prefix: Prefix
    slot: int
    table: PageTable = field(default_factory=PageTable)


class PrefillAhead:
    """A bounded queue of prefixes."""

    def __init__(self, kv: KVManager, most: int = 64) -> None:
        self._kv = kv
        self._most = most
        self._queue: deque[Prefix] = deque()
        self._flight: _Flight | None = None
        self._done: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(list(self._queue))

    def add(self, prefix: Prefix) -> None:
        """Queue a prefix; those that somebody waits for come first, and are never crowded out."""
        if prefix.idle:
            self._queue.append(prefix)
        else:
            self._queue.appendleft(prefix)
        waiting = [p for p in self._queue if p.idle]
        for late in waiting[: max(0, len(waiting) - self._most)]:
            self.drop(late, "newer ones wait")

    def drop(self, prefix: Prefix, why: str) -> None:
        """Give up a queued prefix; what was computed of it stays in the tree like anything else."""
        prefix.dropped = why
        self._end(prefix)

    def forget(self, prefix: Prefix) -> None:
        """Give up a queued prefix, and share nothing of it from now on."""
        prefix.forgotten = True
        self.drop(prefix, "its owner was forgotten")

    @property
    def forgetting(self) -> bool:
        """Whether a step still writes for a prefix that was forgotten."""
        return self._flight is not None and self._flight.prefix.forgotten

    def take(self) -> list[Prefix]:
        """Those that have ended since the last call; their tables are the caller's to free."""
        done, self._done = self._done, []
        return done

    def row(self, step: int, budget: int, claim: Callable[[], int] | None, *, idle: bool) -> BatchRow | None:
        """The next tokens of the first prefix, as a row of `step`, from a budget that nobody else wants.

        `claim` takes a free slot, None if there is none; `idle`: the step has no other row.
        """
        while self._queue and self._flight is None and (idle or not self._queue[0].idle):
            prefix = self._queue[0]
            table = PageTable(session=prefix.session)
            found = self._kv.match(table, prefix.namespace, prefix.token_ids, len(prefix.token_ids))
            if found == len(prefix.token_ids):
                prefix.table = table
                self._end(prefix)
                continue
            count = min(CHUNK, budget, len(prefix.token_ids) - found) // self._kv.page_size * self._kv.page_size
            if claim is None or count == 0:
                self._kv.free(table)
                if claim is None or not idle:
                    return None
                self.drop(prefix, "a step has fewer tokens than a page")
                continue
            if not self._allocate(prefix, table, count):
                self._kv.free(table)
                if self._kv.num_returning:
                    return None
                self.drop(prefix, "no memory was free")
                continue
            flight = self._flight = _Flight(step, prefix, claim(), table)
            row = BatchRow(flight.slot, list(prefix.token_ids[found : found + count]), False, found, found, table.pages)
            table.kv_len += count
            prefix.computed += count
            return row
        return None

    def collect(self, step: int) -> list[int]:
        """`step` has finished: what it wrote is shared. Returns slots that are free again."""
        flight = self._flight
        if flight is None or flight.step != step:
            return []
        self._flight = None
        prefix, table = flight.prefix, flight.table
        if not prefix.forgotten:
            self._kv.publish(table, prefix.namespace, prefix.token_ids, table.kv_len)
        self._kv.free(table)
        return [flight.slot]

    def slots(self) -> list[int]:
        """The slot of a row that has not been collected."""
        return [] if self._flight is None else [self._flight.slot]

    def tables(self) -> list[PageTable]:
        """All that hold pages now."""
        flying = [] if self._flight is None else [self._flight.table]
        return flying + [prefix.table for prefix in self._done]

    def _allocate(self, prefix: Prefix, table: PageTable, count: int) -> bool:
        """Room for one more row. What others evict again and again is not computed for ever."""
        kv = self._kv
        if prefix.computed > 2 * len(prefix.token_ids):
            return False
        room = kv.num_spare if prefix.idle else kv.num_available
        return kv.pages_needed(table, count) <= room and kv.allocate(table, count, PageClass.PROMPT)

    def _end(self, prefix: Prefix) -> None:
        self._queue.remove(prefix)
        self._done.append(prefix)
