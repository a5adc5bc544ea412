"""The scheduler's one door to KV memory: match, allocate, fork, fold, swap, publish, free. No torch.

A branch's memory is a `PageTable`: which pages, how many stored entries (`kv_len`). Stored
entries and logical tokens are different things; this module only ever speaks of entries,
except where it is told token ids to match or publish a raw prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from thinkfold.errors import ParameterError
from thinkfold.kv.blocks import ONE_RANK, HeadBlocks
from thinkfold.kv.growth import GrowthPlan, Replacement, written_blocks
from thinkfold.kv.host_tier import HostTier
from thinkfold.kv.integrity import check_memory
from thinkfold.kv.pages import PageClass, PagePool
from thinkfold.kv.prefixes import SharedPrefixes
from thinkfold.kv.radix import Namespace
from thinkfold.kv.room import Room
from thinkfold.kv.shards import Shards
from thinkfold.kv.summary import SummaryGrowth, SummaryTable
from thinkfold.kv.table import HostPlaces, PageTable
from thinkfold.kv.work import KVWork, WorkList


class KVManager:
    """Memory for branches out of one pool of pages, with an optional shared prefix tree.

    Pages opened for summaries lend `page_blocks` head blocks, one for each of the `num_heads` (layer, KV head)
    pairs where it is 0. `reserve_pages` are for summaries only, so that a fold succeeds when nothing else is
    free; what returns fills them up first. `host_pages` is the host tier's size, `shards` say which rank a head is on.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool,
        num_heads: int = 1,
        page_blocks: int = 0,
        reserve_pages: int = 0,
        host_pages: int = 0,
        shards: Shards = ONE_RANK,
    ) -> None:
        if not 0 <= reserve_pages < num_pages:
            raise ParameterError("reserve_pages", f"must be in [0, {num_pages}), got {reserve_pages}")
        self.page_size = page_size
        self.num_heads = num_heads
        self.reserve_pages = reserve_pages
        self._pool = PagePool(num_pages)
        page_blocks = page_blocks or num_heads
        self.summary_share = num_heads / page_blocks  # of a raw entry's memory that one of a summary takes
        self._blocks = HeadBlocks(self._pool, page_blocks, shards)
        self.prefixes = SharedPrefixes(self._pool, page_size, enabled=enable_prefix_caching)
        self._room = Room(self._pool, self.prefixes, self._blocks, reserve_pages)
        self._host = HostTier(host_pages, page_blocks, shards)
        self._work = WorkList()
        self._launched = -1  # the last launched step: it may still read what is released now

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def capacity(self) -> int:
        """Pages that raw entries can have at most."""
        return self._pool.num_pages - self.reserve_pages

    @property
    def num_available(self) -> int:
        """Pages that raw entries can have now: free ones and idle ones of the prefix tree over the reserve."""
        return self._room.available

    @property
    def num_spare(self) -> int:
        """The same without pinned pages: what work may have that nobody waits for."""
        return self.num_available - self._pool.num_idle_pinned

    @property
    def num_returning(self) -> int:
        """Pages that become available when the steps in flight, and the one being planned, have finished."""
        return self._room.returning

    @property
    def has_work(self) -> bool:
        """Whether the next step has memory work, so that it must be launched even without a row."""
        return bool(self._work)

    def usage(self) -> Mapping[PageClass, int]:
        """Held device pages by class."""
        return self._pool.counts()

    @property
    def host_pages(self) -> int:
        """Size of the host tier."""
        return self._host.num_pages

    def host_usage(self) -> int:
        """Host pages that hold something."""
        return self._host.num_used

    def pages_for(self, entries: int) -> int:
        """Pages that hold `entries` stored entries; head blocks of one head, too."""
        return -(-entries // self.page_size)

    def match(self, table: PageTable, namespace: Namespace, token_ids: Sequence[int], limit: int) -> int:
        """Start an empty table on the longest shared prefix of `token_ids[:limit]`.

        Returns the number of entries found (a multiple of page_size).
        """
        pages = self.prefixes.match(namespace, token_ids, limit, table.session)
        for page in pages:
            self._pool.retain(page, PageClass.PROMPT)
        table.pages = pages
        table.published = len(pages)
        table.kv_len = len(pages) * self.page_size
        return table.kv_len

    def pages_needed(self, table: PageTable, new_entries: int) -> int:
        """Pages that `allocate` would take, a copy-on-write included."""
        return self._pages_missing(table, new_entries) + self._must_copy(table)

    def allocate(self, table: PageTable, new_entries: int, page_class: PageClass) -> bool:
        """Make room for `new_entries` more entries; all or nothing.

        A partly filled last page that somebody else holds too is copied first.
        """
        assert not table.swapped, "a branch on the host cannot grow"
        copies, index = self._must_copy(table), table.kv_len // self.page_size
        needed = self._pages_missing(table, new_entries) + copies
        if needed and not self._room.make(needed):
            return False
        table.shared = min(table.shared, index)  # a page written to is the table's own
        if copies:
            source, target = table.pages[index], self._pool.allocate(page_class)
            self._work.copy(source, target)
            table.pages = [*table.pages[:index], target, *table.pages[index + 1 :]]
            self._release(source)
            needed -= 1
        table.pages += [self._pool.allocate(page_class) for _ in range(needed)]
        return True

    def fork(self, source: PageTable, target: PageTable, entries: int, lengths: list[int] | None = None) -> None:
        """Let the empty `target` share the first `entries` raw entries of `source` and its summaries.

        `lengths`: of these only so many entries of each head, as they stood when `entries` were all; None is all.
        Where a row of the step being planned writes to them, `target` may grow from the next step on.
        """
        assert not source.swapped, "a branch on the host cannot fork"
        first = 0 if lengths is not None else source.last_gap * self.page_size
        assert first <= entries <= source.kv_len, "a fork inside a span taken out"
        pages = source.pages[: self.pages_for(entries)]
        for page in pages:
            self._pool.retain(page, PageClass.PROMPT)
        target.pages = pages
        target.kv_len = entries
        target.published = min(source.published, entries // self.page_size)
        target.shared = len(pages)
        target.parted = source.parted
        target.gaps = [gap for gap in source.gaps if gap * self.page_size <= entries]
        target.summary = source.summary.upto(source.summary.lengths if lengths is None else lengths, self.page_size)
        for block in chain.from_iterable(target.summary.blocks):
            self._blocks.retain(block)

    def publish(self, table: PageTable, namespace: Namespace, token_ids: Sequence[int], written: int) -> None:
        """Put the full pages of the first `written` raw entries into the prefix tree.

        Call it only for tokens whose KV is written. Where the tree has an equal page, the
        table moves to that one, so a branch always holds all ancestors of its pages. Pages
        that must wait for a fork's move are put there by a later call.
        """
        if not table.swapped:
            self.prefixes.publish(table, namespace, token_ids, written // self.page_size, self._release)

    def free(self, table: PageTable) -> None:
        """Return everything a branch holds, on the device and on the host."""
        self._release_device(table)
        if table.host is not None:
            self._release_host(table.host.pages, chain.from_iterable(table.host.blocks))
        self._release_host(table.offload_pages, [])
        table.host, table.offload_pages = None, []
        table.summary, table.gaps = SummaryTable(), []
        table.kv_len = 0

    def rewind(self, table: PageTable, entries: int) -> None:
        """Forget the last raw entries beyond `entries`; their slots are written again."""
        assert entries >= table.last_gap * self.page_size, "a rewind to before a span taken out"
        if entries >= table.kv_len:
            return
        table.kv_len = entries
        table.published = min(table.published, entries // self.page_size)
        if table.host is None:
            refs, keep = self._pool.refs, self.pages_for(entries)
            while keep < len(table.pages) and refs[table.pages[keep]] == 1:
                keep += 1
            self._shorten(table, keep)  # a fork still reads the others

    def blocks_needed(self, table: PageTable, counts: Sequence[int]) -> int:
        """Head blocks that a fold of `counts` entries by head would take, copies-on-write included."""
        return sum(self._growth(table, counts).blocks)

    def pages_for_fold(self, counts: Sequence[int]) -> int:
        """Pages that a fold's head blocks fill; no fold of a branch without forks opens more."""
        return self._blocks.pages_for([*map(self.pages_for, counts)])

    def has_room(self, counts: Sequence[int]) -> bool:
        """Whether a fold of `counts` entries by head would find its head blocks now."""
        return self._room.holds_blocks([*map(self.pages_for, counts)])

    def fold(self, table: PageTable, first_page: int, num_pages: int, counts: Sequence[int]) -> SummaryGrowth | None:
        """Replace full raw pages by a summary of `counts` entries by head; all or nothing.

        The caller hands the growth to the step being planned, in the order of the calls. None:
        not even the reserve has the blocks now, or the step has yet to bring in what it would
        read.
        """
        pages = self._span(table, first_page, num_pages)
        plan = self._growth(table, counts)
        last = [blocks[-1] for blocks in table.summary.blocks if blocks]
        if self._work.fills(pages, last) or not self._room.make_for_blocks(plan.blocks):
            return None
        table.summary, growth = plan.grow(self._blocks.allocate(plan.blocks), self.summary_share)
        read = [source for _, source, _ in growth.copies]
        self._work.fold(pages, read, written_blocks(table.summary, growth, self.page_size))
        self._release_blocks(read)
        self.drop_pages(table, first_page, num_pages)
        return growth

    def refold(self, table: PageTable, places: list[int], length: int, counts: Sequence[int]) -> SummaryGrowth | None:
        """Replace `length` full blocks of each head, from number `places[h]` on, by `counts` entries; all or nothing.

        What `fold` says of the growth and of None holds here, too; the growth starts where the old blocks did.
        """
        plan = Replacement(table.summary, self.page_size, places, length, list(counts))
        old = plan.old
        if self._work.writes([], old) or not self._room.make_for_blocks(plan.blocks):
            return None
        table.summary, growth = plan.make(self._blocks.allocate(plan.blocks))
        self._work.fold([], old, chain.from_iterable(growth.new_blocks))
        self._release_blocks(old)
        return growth

    def shared(self, pages: Iterable[int]) -> bool:
        """Whether somebody else holds one of a table's `pages`, too."""
        return any(self._pool.refs[page] > 1 for page in pages)

    def adopt(self, table: PageTable, source: PageTable, first_page: int, num_pages: int, lengths: list[int]) -> None:
        """Replace full raw pages by what `source` has put in the place of equal ones: its first `lengths` entries."""
        self._span(table, first_page, num_pages)
        summary, before = source.summary.upto(lengths, self.page_size), table.summary
        for block in chain.from_iterable(summary.blocks):
            self._blocks.retain(block)
        table.summary = summary
        self._release_blocks(chain.from_iterable(before.blocks))
        self.drop_pages(table, first_page, num_pages)

    def drop_pages(self, table: PageTable, first_page: int, num_pages: int) -> None:
        """Forget full raw pages without a summary."""
        self._span(table, first_page, num_pages)
        for page in reversed(table.cut(first_page, num_pages, self.page_size)):
            self._release(page)

    def offload(self, table: PageTable, first_page: int, num_pages: int) -> bool:
        """Move full raw pages to the host for good; False, and nothing changes, if they cannot go now."""
        if not self._host.fits(num_pages, []):
            return False
        pages = self._span(table, first_page, num_pages)
        if self._work.writes(pages, []):
            return False
        table.offload_pages = table.offload_pages + self._pages_out(pages)
        self.drop_pages(table, first_page, num_pages)
        return True

    def swap_out(self, table: PageTable) -> bool:
        """Move a whole branch to the host; False, and nothing changes, if it cannot go now.

        The branch has no row in the step being planned. It cannot go if the host has no place
        or if that step has memory work that writes to it (`settled`).
        """
        assert not table.swapped, "a branch is swapped out once"
        blocks, wanted = list(chain.from_iterable(table.summary.blocks)), [*map(len, table.summary.blocks)]
        stored = self.pages_for(table.kv_len)
        if not self.settled(table) or not self._host.fits(stored, wanted):
            return False
        places = iter(self._host.take_blocks(wanted))
        host = HostPlaces([], [[next(places) for _ in head] for head in table.summary.blocks])
        for block, place in zip(blocks, chain.from_iterable(host.blocks), strict=True):
            self._work.block_out(block, place)
        host.pages = self._pages_out(table.pages[:stored])
        self._release_device(table)
        table.host = host
        table.summary = replace(table.summary, blocks=[[] for _ in table.summary.lengths])
        return True

    def swap_in(self, table: PageTable, headroom: int) -> bool:
        """Bring a branch back to fresh pages of its own, with `headroom` pages left available; else False."""
        host = table.host
        assert host is not None, "only a branch that was swapped out comes back"
        blocks, wanted = list(chain.from_iterable(host.blocks)), [*map(len, host.blocks)]
        needed = len(host.pages) + self._blocks.pages_needed(wanted)
        if needed + headroom > self.num_available or not self._room.make(needed):
            return False
        fresh = iter(self._blocks.allocate(wanted))
        table.summary = replace(table.summary, blocks=[[next(fresh) for _ in head] for head in host.blocks])
        for place, block in zip(blocks, chain.from_iterable(table.summary.blocks), strict=True):
            self._work.block_in(place, block)
        table.pages = [self._pool.allocate(self._host.class_of(place)) for place in host.pages]
        for place, page in zip(host.pages, table.pages, strict=True):
            self._work.page_in(place, page)
        table.host = None
        self._release_host(host.pages, blocks)
        return True

    def settled(self, table: PageTable) -> bool:
        """Whether the step being planned has no memory work that writes to the branch's memory."""
        return not self._work.writes(table.pages, chain.from_iterable(table.summary.blocks))

    def clear_cache(self) -> None:
        """Drop every idle page of the prefix tree."""
        self.prefixes.clear()

    def take_work(self) -> KVWork:
        """Copies that the next launched step must do; call it right before `launch_step`."""
        return self._work.take()

    def launch_step(self, step: int) -> None:
        """`step` was launched: pages released from now on may be read by it."""
        self._launched = step
        self._work.launched()

    def finish_step(self, step: int) -> None:
        """`step` has finished on the device."""
        self._pool.finish_step(step)
        self._blocks.finish_step(step)
        self._host.finish_step(step)

    def _span(self, table: PageTable, first_page: int, num_pages: int) -> list[int]:
        """The pages of a span that may leave the table."""
        end = first_page + num_pages
        assert not table.swapped, "a branch on the host cannot be folded"
        assert 0 <= first_page <= end <= table.kv_len // self.page_size, "a span is made of full pages"
        pages = table.pages[first_page:end]
        shared = first_page < table.published or any(map(self._pool.in_tree, pages))
        assert not shared, "pages of the shared prefix are never folded"
        return pages

    def _growth(self, table: PageTable, counts: Sequence[int]) -> GrowthPlan:
        assert len(counts) == self.num_heads, f"{len(counts)} counts for {self.num_heads} heads"
        return GrowthPlan.of(table.summary, counts, self.page_size, self._blocks.refs)

    def _pages_out(self, pages: list[int]) -> list[int]:
        places = self._host.take_pages([self._pool.class_of(page) for page in pages])
        for page, place in zip(pages, places, strict=True):
            self._work.page_out(page, place)
        return places

    def _pages_missing(self, table: PageTable, new_entries: int) -> int:
        return max(0, self.pages_for(table.kv_len + new_entries) - len(table.pages))

    def _must_copy(self, table: PageTable) -> bool:
        index, offset = divmod(table.kv_len, self.page_size)
        return offset > 0 and self._pool.refs[table.pages[index]] > 1

    def _release(self, page: int) -> None:
        # the step being planned still uses what its memory work reads and writes
        self._pool.release(page, self._launched + self._work.uses_page(page))
        self.prefixes.note_idle(page)

    def _release_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks.release(block, self._launched + self._work.uses_block(block))

    def _release_device(self, table: PageTable) -> None:
        """Return a branch's pages and head blocks; entries and lengths stay."""
        self._shorten(table, 0)
        table.published = 0
        table.parted = False
        blocks = list(chain.from_iterable(table.summary.blocks))
        self._release_blocks(self._blocks.release_pages(blocks, self._launched + self._work.uses_blocks))

    def _release_host(self, pages: Iterable[int], blocks: Iterable[int]) -> None:
        for page in pages:
            self._host.release_page(page, self._launched + self._work.uses_host_page(page))
        for block in blocks:
            self._host.release_block(block, self._launched + self._work.uses_host_block(block))

    def _shorten(self, table: PageTable, pages: int) -> None:
        """Return the pages beyond the first `pages`."""
        surplus, table.pages = table.pages[pages:], table.pages[:pages]
        table.shared = min(table.shared, pages)
        for page in reversed(surplus):
            self._release(page)

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Raise AssertionError unless pools, tree, head blocks and the given tables agree."""
        check_memory(self._pool, self._blocks, self._host, self.prefixes, list(tables), self.page_size)
