"""Head blocks lent one by one out of pages of class `summary`, with reference counts.

A block is a place of `page_size` entries of one KV head of one layer; block id = page * page_blocks
+ index. A page has as many blocks as there are heads, or more where summaries are kept in fewer bits.
Any head of any branch may hold any block of an open page that lies on its rank: of N ranks, each has
the next N-th of a page's blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from thinkfold.kv.pages import PageClass, PagePool
from thinkfold.kv.quarantine import Quarantine
from thinkfold.kv.shards import Shards

ONE_RANK = Shards()


@dataclass(slots=True, eq=False)
class _OpenPage:
    page: int
    refs: list[int]  # of each of its blocks
    free: list[list[int]]  # by rank
    lent: int = 0  # blocks that somebody holds
    last_read: int = -1  # the last step that may use a block released so far


class HeadBlocks:
    """Head blocks of pages that are opened as they are needed and given back when empty.

    A released block is quarantined like a page: it is lent again only when the last step
    launched before its release has finished.
    """

    def __init__(self, pool: PagePool, page_blocks: int, shards: Shards = ONE_RANK) -> None:
        self._pool = pool
        self._page_blocks = page_blocks
        self._shards = shards
        self._own = page_blocks // shards.count  # blocks of a page on one rank
        self._pages: dict[int, _OpenPage] = {}
        self._quarantine: Quarantine[tuple[_OpenPage, int]] = Quarantine()
        self._num_free = [0] * shards.count  # blocks that open pages can lend now, by rank

    def pages(self) -> Iterator[int]:
        """All open pages."""
        return iter(self._pages)

    def refs(self, block: int) -> int:
        """How many hold a lent block."""
        page, index = divmod(block, self._page_blocks)
        return self._pages[page].refs[index]

    def pages_for(self, wanted: Sequence[int]) -> int:
        """Pages that `wanted` blocks by head fill."""
        return self._shards.pages(wanted, self._page_blocks)

    def pages_needed(self, wanted: Sequence[int]) -> int:
        """Pages that `allocate(wanted)` would open."""
        missing = max(w - free for w, free in zip(self._shards.totals(wanted), self._num_free, strict=True))
        return -(-max(0, missing) // self._own)

    def allocate(self, wanted: Sequence[int]) -> list[int]:
        """Lend `wanted` blocks by head, one head's after the other's: of the fullest open pages first, so that the
        others run empty.

        Raises IndexError if the pool has not the pages that `pages_needed` says.
        """
        before = list(self._pages.values())
        opened = [self._open() for _ in range(self.pages_needed(wanted))]
        totals = self._shards.totals(wanted)
        lent = [self._lend(rank, count, before, opened) if count else [] for rank, count in enumerate(totals)]
        if len(lent) == 1:
            return lent[0]
        own = [iter(blocks) for blocks in lent]
        return [next(own[self._shards.of(head)]) for head, count in enumerate(wanted) for _ in range(count)]

    def _lend(self, rank: int, count: int, before: list[_OpenPage], opened: list[_OpenPage]) -> list[int]:
        """`count` blocks of one rank from pages open `before`, the fullest first, and then from new ones."""
        open_pages = sorted((p for p in before if p.free[rank]), key=lambda p: (len(p.free[rank]), p.page)) + opened
        self._num_free[rank] -= count
        blocks: list[int] = []
        for page in open_pages:
            free = page.free[rank]
            taken = min(count - len(blocks), len(free))
            lent = free[len(free) - taken :]
            lent.reverse()
            del free[len(free) - taken :]
            for index in lent:
                page.refs[index] = 1
            first = page.page * self._page_blocks
            blocks += [first + index for index in lent]
            page.lent += taken
        return blocks

    def retain(self, block: int) -> None:
        """Add a holder to a block that somebody holds already."""
        page, index = divmod(block, self._page_blocks)
        assert self._pages[page].refs[index] > 0, f"block {block} is not lent"
        self._pages[page].refs[index] += 1

    def release(self, block: int, after_step: int) -> None:
        """Drop one reference; the block can be lent again once `after_step` has finished."""
        number, index = divmod(block, self._page_blocks)
        page = self._pages[number]
        page.refs[index] -= 1
        if page.refs[index] > 0:
            return
        page.lent -= 1
        page.last_read = max(page.last_read, after_step)
        if page.lent == 0:
            self._close(page)
        elif not self._quarantine.hold((page, index), after_step):
            self._lendable(page, index)

    def release_pages(self, blocks: Sequence[int], after_step: int) -> list[int]:
        """Close the pages of which `blocks`, each with one holder, are all that is lent; returns the other blocks.

        What a request has folded fills whole pages: ending it must not take a step's time for each of its blocks.
        """
        counts = Counter(block // self._page_blocks for block in blocks)
        for number, count in list(counts.items()):
            page = self._pages[number]
            if count == page.lent and max(page.refs) == 1:
                page.lent, page.last_read = 0, max(page.last_read, after_step)
                self._close(page)
                del counts[number]
        return [block for block in blocks if block // self._page_blocks in counts] if counts else []

    def finish_step(self, step: int) -> None:
        """`step` has finished on the device: what waited for it can be lent again."""
        for page, index in self._quarantine.finish_step(step):
            if self._pages.get(page.page) is page:  # else it went back to the pool meanwhile
                self._lendable(page, index)

    def _open(self) -> _OpenPage:
        number, own = self._pool.allocate(PageClass.SUMMARY), self._own
        free = [list(range((rank + 1) * own - 1, rank * own - 1, -1)) for rank in range(self._shards.count)]
        page = self._pages[number] = _OpenPage(number, [0] * self._page_blocks, free)
        for rank in range(self._shards.count):
            self._num_free[rank] += own
        return page

    def _close(self, page: _OpenPage) -> None:
        """The pool keeps the page in quarantine for its blocks."""
        del self._pages[page.page]
        for rank, free in enumerate(page.free):
            self._num_free[rank] -= len(free)
        self._pool.release(page.page, page.last_read)

    def _lendable(self, page: _OpenPage, index: int) -> None:
        rank = index // self._own
        page.free[rank].append(index)
        self._num_free[rank] += 1

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless references equal the blocks listed by all holders."""
        held = Counter(block for blocks in holders for block in blocks)
        waiting = Counter(page.page for page, _ in self._quarantine if self._pages.get(page.page) is page)
        for number, page in self._pages.items():
            assert page.page == number and page.lent > 0, f"page {number} is open and lends nothing"
            assert page.lent == sum(refs > 0 for refs in page.refs), f"page {number} miscounts what it lent"
            places = [(index, rank) for rank, free in enumerate(page.free) for index in free]
            assert len(set(places)) == len(places), f"page {number} has a block free twice"
            assert all(page.refs[index] == 0 for index, _ in places), f"page {number} has a lent block free"
            assert all(index // self._own == rank for index, rank in places), f"page {number} mixes up its ranks"
            lost = self._page_blocks - page.lent - len(places) - waiting[number]
            assert lost == 0, f"page {number} has lost {lost} blocks"
            for index, refs in enumerate(page.refs):
                block = number * self._page_blocks + index
                assert refs == held.pop(block, 0), f"block {block}: {refs} references, not as many holders"
        assert not held, f"blocks {sorted(held)} are held and belong to no open page"
        free = [sum(len(p.free[rank]) for p in self._pages.values()) for rank in range(self._shards.count)]
        assert self._num_free == free, "free blocks are miscounted"
