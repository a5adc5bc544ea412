"""The scheduler's one door to KV memory: match, allocate, fork, publish, free. No torch.

A branch's memory is a `PageTable`: which pages, how many stored entries (`kv_len`). Stored
entries and logical tokens are different things; this module only ever speaks of entries,
except where it is told token ids to match or publish a raw prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinkfold.kv.pages import PageClass, PagePool
from thinkfold.kv.radix import Namespace, RadixCache


@dataclass(slots=True, eq=False)
class PageTable:
    """One branch's view of KV memory.

    `published` leading pages are the prefix tree's; `shared` leading pages came from a fork
    and are paid for by the branch they came from. `parted`: it has moved to pages of the tree
    and a fork of it has not.
    """

    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    published: int = 0
    shared: int = 0
    parted: bool = False


class KVManager:
    """Pages for branches out of one pool, with an optional shared prefix tree."""

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool) -> None:
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._radix = RadixCache(self._pool, page_size) if enable_prefix_caching else None
        self._copies: list[tuple[int, int]] = []
        self._launched = -1  # the last launched step: it may still read what is released now

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones and idle cached ones."""
        return self._pool.num_free + self._pool.num_idle_cached

    @property
    def num_returning(self) -> int:
        """Pages that become free when the steps in flight have finished."""
        return self._pool.num_quarantined

    def usage(self) -> Mapping[PageClass, int]:
        """Held pages by class."""
        return self._pool.counts()

    def pages_for(self, entries: int) -> int:
        """Pages that hold `entries` stored entries."""
        return -(-entries // self.page_size)

    def match(self, table: PageTable, namespace: Namespace, token_ids: Sequence[int], limit: int) -> int:
        """Start an empty table on the longest shared prefix of `token_ids[:limit]`.

        Returns the number of entries found (a multiple of page_size).
        """
        if self._radix is None:
            return 0
        pages = self._radix.match(namespace, token_ids, limit)
        for page in pages:
            self._pool.retain(page, PageClass.PROMPT)
        table.pages = pages
        table.published = len(pages)
        table.kv_len = len(pages) * self.page_size
        return table.kv_len

    def pages_needed(self, table: PageTable, new_entries: int) -> int:
        """Pages that `allocate` would take, a copy-on-write included."""
        missing = self.pages_for(table.kv_len + new_entries) - len(table.pages)
        return max(0, missing) + (1 if self._must_copy(table) else 0)

    def allocate(self, table: PageTable, new_entries: int, page_class: PageClass) -> bool:
        """Make room for `new_entries` more entries; all or nothing.

        A partly filled last page that somebody else holds too is copied first.
        """
        needed = self.pages_needed(table, new_entries)
        if needed > self.num_available:
            return False
        if needed > self._pool.num_free and self._radix is not None:
            self._radix.evict(needed - self._pool.num_free)
        if needed > self._pool.num_free:  # the evicted pages are still being read
            return False
        index = table.kv_len // self.page_size
        table.shared = min(table.shared, index)  # a page written to is the table's own
        if self._must_copy(table):
            source, target = table.pages[index], self._pool.allocate(page_class)
            self._copies.append((source, target))
            table.pages[index] = target
            self._release(source)
            needed -= 1
        table.pages += [self._pool.allocate(page_class) for _ in range(needed)]
        return True

    def fork(self, source: PageTable, target: PageTable, entries: int) -> None:
        """Let the empty `target` share the first `entries` entries of `source`."""
        pages = source.pages[: self.pages_for(entries)]
        for page in pages:
            self._pool.retain(page, PageClass.PROMPT)
        target.pages = pages
        target.kv_len = entries
        target.published = min(source.published, entries // self.page_size)
        target.shared = len(pages)
        target.parted = source.parted

    def publish(self, table: PageTable, namespace: Namespace, token_ids: Sequence[int], written: int) -> None:
        """Put the full pages of the first `written` raw entries into the prefix tree.

        Call it only for tokens whose KV is written. Where the tree has an equal page, the
        table moves to that one, so a branch always holds all ancestors of its pages. Pages
        that must wait for a fork's move are put there by a later call.
        """
        full = written // self.page_size
        if self._radix is None or full <= table.published:
            return
        start = table.published
        known, table.parted = self._radix.insert(namespace, token_ids, table.pages[:full], start, table.parted)
        for index, page in enumerate(known, start):
            own = table.pages[index]
            if page != own:
                self._pool.retain(page, PageClass.PROMPT)
                table.pages[index] = page
                self._release(own)
        table.published = start + len(known)

    def free(self, table: PageTable) -> None:
        """Return everything a branch holds."""
        for page in reversed(table.pages):
            self._release(page)
        table.pages = []
        table.kv_len = table.published = table.shared = 0
        table.parted = False

    def rewind(self, table: PageTable, entries: int) -> None:
        """Forget the last entries beyond `entries`; their slots are written again."""
        table.kv_len = min(table.kv_len, entries)

    def clear_cache(self) -> None:
        """Drop every idle page of the prefix tree."""
        if self._radix is not None:
            self._radix.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """Page copies (source, target) that the next launched step must do first."""
        copies, self._copies = self._copies, []
        return copies

    def launch_step(self, step: int) -> None:
        """`step` was launched: pages released from now on may be read by it."""
        self._launched = step

    def finish_step(self, step: int) -> None:
        """`step` has finished on the device."""
        self._pool.finish_step(step)

    def _must_copy(self, table: PageTable) -> bool:
        index, offset = divmod(table.kv_len, self.page_size)
        return offset > 0 and self._pool.refs[table.pages[index]] > 1

    def _release(self, page: int) -> None:
        # the step being planned reads the sources of its copies
        read_next = any(page == source for source, _ in self._copies)
        self._pool.release(page, self._launched + read_next)
        if self._radix is not None:
            self._radix.note_idle(page)

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Raise AssertionError unless pool, tree and the given tables agree."""
        tables = list(tables)
        tree = list(self._radix.pages()) if self._radix is not None else []
        self._pool.check_integrity([*(t.pages for t in tables), tree])
        for table in tables:
            assert len(table.pages) >= self.pages_for(table.kv_len), "a table has entries without a page"
            assert len(set(table.pages)) == len(table.pages), "a table holds a page twice"
        if self._radix is not None:
            self._radix.check_integrity()
