"""Copies that the step being planned does to KV memory, and every place that they use.

A step does its memory work in this order: swap-outs, folds (as they were made), copies, swap-ins,
then its forward. Whatever that work reads or writes is not handed on before the step has finished,
so within a list no place is written twice or both read and written, folds of one branch apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class KVWork:
    """Pairs (from, to) of device and host pages and head blocks, as in `scheduler.output.MemoryWork`."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_out: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_in: list[tuple[int, int]] = field(default_factory=list)


class WorkList:
    """Work of the step being planned. Places stay in use until `launched`."""

    def __init__(self) -> None:
        self._work = KVWork()
        self._empty = True
        self._pages: set[int] = set()
        self._blocks: set[int] = set()
        self._host_pages: set[int] = set()
        self._host_blocks: set[int] = set()
        self._copied: dict[int, int] = {}  # page: the page it becomes a copy of
        self._entered: dict[int, int] = {}  # page: the host page it is filled from
        self._blocks_entered: set[int] = set()
        self._blocks_written: set[int] = set()  # by a fold

    def __bool__(self) -> bool:
        """Whether the next step has something to do."""
        return not self._empty

    def page_out(self, page: int, host_page: int) -> None:
        """Copy a page to the host."""
        self._work.swap_out.append((page, host_page))
        self._pages.add(page)
        self._host_pages.add(host_page)
        self._empty = False

    def block_out(self, block: int, host_block: int) -> None:
        """Copy a head block to the host."""
        self._work.blocks_out.append((block, host_block))
        self._blocks.add(block)
        self._host_blocks.add(host_block)
        self._empty = False

    def page_in(self, host_page: int, page: int) -> None:
        """Fill a fresh page from the host."""
        self._work.swap_in.append((host_page, page))
        self._entered[page] = host_page
        self._pages.add(page)
        self._host_pages.add(host_page)
        self._empty = False

    def block_in(self, host_block: int, block: int) -> None:
        """Fill a fresh head block from the host."""
        self._work.blocks_in.append((host_block, block))
        self._blocks_entered.add(block)
        self._blocks.add(block)
        self._host_blocks.add(host_block)
        self._empty = False

    def copy(self, source: int, target: int) -> None:
        """Make a fresh page a copy of another; one that is filled in this step has its content from elsewhere."""
        if source in self._entered:
            self.page_in(self._entered[source], target)
            return
        source = self._copied.get(source, source)
        self._work.copies.append((source, target))
        self._copied[target] = source
        self._pages.update((source, target))
        self._empty = False

    def fold(self, pages: Iterable[int], read: Iterable[int], written: Iterable[int]) -> None:
        """A fold reads raw pages and the head blocks `read`, and writes the head blocks `written`."""
        self._pages.update(pages)
        self._blocks.update(read)
        self._blocks_written.update(written)
        self._blocks |= self._blocks_written
        self._empty = False

    def uses_page(self, page: int) -> bool:
        return page in self._pages

    def uses_block(self, block: int) -> bool:
        return block in self._blocks

    @property
    def uses_blocks(self) -> bool:
        """Whether any head block is used."""
        return bool(self._blocks)

    def uses_host_page(self, page: int) -> bool:
        return page in self._host_pages

    def uses_host_block(self, block: int) -> bool:
        return block in self._host_blocks

    def fills(self, pages: Iterable[int], blocks: Iterable[int]) -> bool:
        """Whether a copy or a swap-in has yet to fill one of these: a fold would read it too early."""
        entered = self._blocks_entered
        return any(p in self._copied or p in self._entered for p in pages) or any(b in entered for b in blocks)

    def writes(self, pages: Iterable[int], blocks: Iterable[int]) -> bool:
        """Whether any work has yet to write one of these: a swap-out would read it too early."""
        blocks = list(blocks)
        return self.fills(pages, blocks) or any(b in self._blocks_written for b in blocks)

    def take(self) -> KVWork:
        """What the step does. Its places stay in use."""
        work, self._work = self._work, KVWork()
        self._empty = True
        return work

    def launched(self) -> None:
        """The step is launched: from now on the quarantine guards its places."""
        assert self._empty, "a step was launched without its memory work"
        for places in (self._pages, self._blocks, self._host_pages, self._host_blocks):
            places.clear()
        self._copied.clear()
        self._entered.clear()
        self._blocks_entered.clear()
        self._blocks_written.clear()
