"""What requests share: the prefix tree, who may publish into it, and what stays in it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thinkfold.kv.pages import PageClass, PagePool
from thinkfold.kv.pins import PinBoard
from thinkfold.kv.radix import Namespace, RadixCache
from thinkfold.kv.table import PageTable


class SharedPrefixes:
    """The prefix tree and its pins; switched off (`enabled` False) it finds and keeps nothing."""

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool) -> None:
        self._pool = pool
        self._page_size = page_size
        self._radix = RadixCache(pool, page_size)
        self.enabled = enabled
        self.pins = PinBoard(pool, self._radix)

    def match(self, namespace: Namespace, token_ids: Sequence[int], limit: int, session: str = "") -> list[int]:
        """Pages of the longest shared prefix of `token_ids[:limit]`, which `session` uses from now on, too."""
        return self._radix.match(namespace, token_ids, limit, session) if self.enabled else []

    def publish(
        self,
        table: PageTable,
        namespace: Namespace,
        token_ids: Sequence[int],
        full: int,
        release: Callable[[int], None],
    ) -> None:
        """Put the first `full` pages of `table` into the tree; see `KVManager.publish`."""
        if not self.enabled or full <= table.published:
            return
        assert not table.gaps or full <= table.gaps[0], "pages behind a span taken out are private"
        start = table.published
        pages = table.pages[:full]
        known, table.parted = self._radix.insert(namespace, token_ids, pages, start, table.parted, table.session)
        own = table.pages[start : start + len(known)]
        if known != own:
            table.pages = [*table.pages[:start], *known, *table.pages[start + len(known) :]]
        for page, before in zip(known, own, strict=True):
            if page != before:
                self._pool.retain(page, PageClass.PROMPT)
                release(before)
        table.published = start + len(known)

    def evict(self, pages: int) -> bool:
        """Drop idle pages, pinned ones last; False, and nothing changes, if there are not so many."""
        if pages > self._pool.num_idle:
            return False
        self.pins.revoke(pages)
        self._radix.evict(pages)
        return True

    def note_idle(self, page: int) -> None:
        """A holder let go of `page`."""
        self._radix.note_idle(page)

    def clear(self) -> None:
        """Drop every idle page but the pinned ones."""
        self._radix.clear()

    def forget(self, labels: Namespace, session: str = "") -> int:
        """See `RadixCache.forget`."""
        return self._radix.forget(labels, session)

    def pages(self) -> Iterable[int]:
        """All pages that the tree holds."""
        return self._radix.pages()

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree, pins and pool agree."""
        self._radix.check_integrity()
        self.pins.check_integrity()
