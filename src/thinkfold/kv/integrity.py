"""What must be true of pools, tables and the prefix tree between two calls. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from thinkfold.kv.blocks import HeadBlocks
from thinkfold.kv.host_tier import HostTier
from thinkfold.kv.pages import PagePool
from thinkfold.kv.prefixes import SharedPrefixes
from thinkfold.kv.table import PageTable


def check_memory(
    pool: PagePool,
    blocks: HeadBlocks,
    host: HostTier,
    prefixes: SharedPrefixes,
    tables: Sequence[PageTable],
    page_size: int,
) -> None:
    """Raise AssertionError unless pools, tree, head blocks and all tables agree."""
    pool.check_integrity([*(t.pages for t in tables), prefixes.pages(), blocks.pages()])
    blocks.check_integrity(chain.from_iterable(t.summary.blocks) for t in tables)
    places = [t.host for t in tables if t.host is not None]
    host_pages = [*(h.pages for h in places), *(t.offload_pages for t in tables)]
    host.check_integrity(host_pages, (chain.from_iterable(h.blocks) for h in places))
    for table in tables:
        table.check_integrity(page_size)
        assert all(pool.in_tree(page) for page in table.pages[: table.published]), "a published page is lost"
    prefixes.check_integrity()
