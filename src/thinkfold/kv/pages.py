"""The page pool: reference counts, classes and the quarantine of pages a launched step still reads.

Knows nothing about requests or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from thinkfold.kv.quarantine import Quarantine


class PageClass(StrEnum):
    """What a held page stores; `cached` and `pinned` pages are held by the prefix tree alone."""

    PROMPT = "prompt"
    THINKING = "thinking"
    SUMMARY = "summary"  # lent out by head blocks
    ANSWER = "answer"
    CACHED = "cached"
    PINNED = "pinned"  # evicted only after the last cached page


class PagePool:
    """Fixed set of pages with reference counts.

    A released page becomes free only when the last step launched before its release has
    finished (`finish_step`), so no step in flight can read a page that was handed on.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._class: list[PageClass | None] = [None] * num_pages
        self._counts: Counter[PageClass] = Counter()
        self._quarantine: Quarantine[int] = Quarantine()
        self._in_tree = bytearray(num_pages)
        self._last_read = [-1] * num_pages  # for idle cached pages: the last step that may read it
        self._pinned = bytearray(num_pages)
        self.num_idle_cached = 0  # pages that only the prefix tree holds, pinned ones apart
        self.num_idle_pinned = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix tree holds."""
        return self.num_idle_cached + self.num_idle_pinned

    def counts(self) -> Mapping[PageClass, int]:
        """Held pages by class."""
        return {c: self._counts[c] for c in PageClass}

    def class_of(self, page: int) -> PageClass:
        """The class of a held page."""
        page_class = self._class[page]
        assert page_class is not None, f"page {page} is not held"
        return page_class

    def in_tree(self, page: int) -> bool:
        """Whether the prefix tree holds `page`."""
        return bool(self._in_tree[page])

    def allocate(self, page_class: PageClass) -> int:
        """Take a free page with one reference. Raises IndexError if none is free."""
        page = self._free.pop()
        self.refs[page] = 1
        self._set_class(page, page_class)
        return page

    def retain(self, page: int, page_class: PageClass) -> None:
        """Add a holder to a page that somebody holds already."""
        if self._in_tree[page] and self.refs[page] == 1:
            self._count_idle(page, -1)
            self._set_class(page, page_class)
        self.refs[page] += 1

    def release(self, page: int, after_step: int) -> None:
        """Drop one reference; the page is free once `after_step` has finished."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._set_class(page, None)
            if not self._quarantine.hold(page, after_step):
                self._free.append(page)
        elif self.refs[page] == 1 and self._in_tree[page]:
            self._last_read[page] = after_step
            self._set_idle(page)

    def adopt(self, page: int) -> None:
        """The prefix tree takes a reference of its own to a page that a request holds."""
        self._in_tree[page] = 1
        self.refs[page] += 1

    def pin(self, page: int, pinned: bool) -> None:
        """Keep a page of the prefix tree from being evicted, or let it go again."""
        assert self._in_tree[page], f"page {page} is pinned outside the prefix tree"
        idle = self.refs[page] == 1
        if idle:
            self._count_idle(page, -1)
        self._pinned[page] = pinned
        if idle:
            self._set_idle(page)

    def pinned(self, page: int) -> bool:
        """Whether `page` must not be evicted."""
        return bool(self._pinned[page])

    def disown(self, page: int) -> None:
        """The prefix tree drops a page that only it holds."""
        assert not self._pinned[page], f"page {page} is pinned"
        self._in_tree[page] = 0
        self.num_idle_cached -= 1
        self.release(page, self._last_read[page])

    def finish_step(self, step: int) -> None:
        """`step` has finished on the device: free what waited for it."""
        self._free += self._quarantine.finish_step(step)

    def _count_idle(self, page: int, count: int) -> None:
        if self._pinned[page]:
            self.num_idle_pinned += count
        else:
            self.num_idle_cached += count

    def _set_idle(self, page: int) -> None:
        self._count_idle(page, 1)
        self._set_class(page, PageClass.PINNED if self._pinned[page] else PageClass.CACHED)

    def _set_class(self, page: int, page_class: PageClass | None) -> None:
        old = self._class[page]
        if old is not None:
            self._counts[old] -= 1
        if page_class is not None:
            self._counts[page_class] += 1
        self._class[page] = page_class

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless counts equal the pages listed by all holders.

        `holders` are the page lists of requests, of the prefix tree and of the head blocks.
        """
        held = Counter(page for pages in holders for page in pages)
        free = set(self._free)
        quarantined = set(self._quarantine)
        assert len(free) == len(self._free), "a page is free twice"
        assert len(quarantined) == len(self._quarantine), "a page is quarantined twice"
        assert not free & quarantined, "a page is free and quarantined"
        for page, refs in enumerate(self.refs):
            assert refs == held[page], f"page {page}: {refs} references, {held[page]} holders"
            assert (refs == 0) == (page in free or page in quarantined), f"page {page} is lost"
        idle = [p for p in range(self.num_pages) if self._in_tree[p] and self.refs[p] == 1]
        pinned = sum(self._pinned[p] for p in idle)
        counted = (self.num_idle_cached, self.num_idle_pinned)
        assert counted == (len(idle) - pinned, pinned), f"{counted} idle pages (cached, pinned) counted, not all found"
        assert sum(self._counts.values()) == self.num_pages - len(free) - len(quarantined), "class counts are off"
