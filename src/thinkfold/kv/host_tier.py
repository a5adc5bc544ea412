"""Places in host memory for what leaves the device: whole pages, and head blocks of summaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinkfold.kv.blocks import ONE_RANK, HeadBlocks
from thinkfold.kv.pages import PageClass, PagePool
from thinkfold.kv.shards import Shards


class HostTier:
    """Host pages and host head blocks by the same arithmetic as on the device; nothing is shared here."""

    def __init__(self, num_pages: int, page_blocks: int, shards: Shards = ONE_RANK) -> None:
        self.num_pages = num_pages
        self._pool = PagePool(num_pages)
        self._blocks = HeadBlocks(self._pool, page_blocks, shards)

    @property
    def num_used(self) -> int:
        """Host pages that hold something, those opened for blocks included."""
        return sum(self._pool.counts().values())

    def fits(self, pages: int, blocks: Sequence[int]) -> bool:
        """Whether so many pages, and head blocks by head, can be had now."""
        return pages + self._blocks.pages_needed(blocks) <= self._pool.num_free

    def take_pages(self, classes: Sequence[PageClass]) -> list[int]:
        """A host page for each class. Raises IndexError where `fits` is false."""
        return [self._pool.allocate(page_class) for page_class in classes]

    def take_blocks(self, wanted: Sequence[int]) -> list[int]:
        """Host head blocks by head, one head's after the other's. Raises IndexError where `fits` is false."""
        return self._blocks.allocate(wanted)

    def class_of(self, page: int) -> PageClass:
        """The class that the page had on the device."""
        return self._pool.class_of(page)

    def release_page(self, page: int, after_step: int) -> None:
        """The page is free once `after_step` has finished."""
        self._pool.release(page, after_step)

    def release_block(self, block: int, after_step: int) -> None:
        """The block is free once `after_step` has finished."""
        self._blocks.release(block, after_step)

    def finish_step(self, step: int) -> None:
        """`step` has finished on the device."""
        self._pool.finish_step(step)
        self._blocks.finish_step(step)

    def check_integrity(self, pages: Iterable[Iterable[int]], blocks: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the tier agrees with the places listed by their holders."""
        self._pool.check_integrity([*pages, self._blocks.pages()])
        self._blocks.check_integrity(blocks)
