"""One branch's view of KV memory, as plain integers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from thinkfold.kv.summary import SummaryTable


@dataclass(slots=True, eq=False)
class HostPlaces:
    """Where a branch lies that was swapped out: host pages in order, host head blocks by head."""

    pages: list[int]
    blocks: list[list[int]]


@dataclass(slots=True, eq=False)
class PageTable:
    """Raw pages and summaries of one branch.

    `kv_len` are stored raw entries. `published` leading pages are the prefix tree's; `shared`
    leading pages came from a fork and are paid for by the branch they came from. `parted`: it
    has moved to pages of the tree and a fork of it has not. `gaps`: raw page indices before
    which a span was taken out (folded, dropped or offloaded), ascending; `offload_pages` are the
    host pages of spans that were offloaded. `host` is set while the branch is swapped out: then
    it holds no device page, and its `kv_len` and summary lengths say what lies there. `session`
    is whose work it is: what it shares is that session's ("" is nobody's own).

    The list `pages` is only ever appended to; any other change puts a new list in its place. So a
    row of a planned step may hold the list itself. Lists of `summary` are replaced, never changed.
    """

    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    published: int = 0
    shared: int = 0
    parted: bool = False
    summary: SummaryTable = field(default_factory=SummaryTable)
    gaps: list[int] = field(default_factory=list)
    offload_pages: list[int] = field(default_factory=list)
    host: HostPlaces | None = None
    session: str = ""

    @property
    def swapped(self) -> bool:
        """Whether the branch lies on the host."""
        return self.host is not None

    @property
    def offloaded(self) -> int:
        """Raw pages that were moved to the host for good."""
        return len(self.offload_pages)

    @property
    def last_gap(self) -> int:
        """Raw page index of the last span taken out: nothing before it is written again."""
        return self.gaps[-1] if self.gaps else 0

    def cut(self, first_page: int, num_pages: int, page_size: int) -> list[int]:
        """Take raw pages out of the middle; returns them. They must be full."""
        end = first_page + num_pages
        pages = self.pages[first_page:end]
        self.pages = self.pages[:first_page] + self.pages[end:]
        self.kv_len -= num_pages * page_size
        self.shared -= max(0, min(self.shared, end) - first_page)
        self.gaps = sorted({first_page, *(g if g <= first_page else max(g - num_pages, first_page) for g in self.gaps)})
        return pages

    def check_integrity(self, page_size: int) -> None:
        """Raise AssertionError unless pages, blocks and lengths agree."""
        host = self.host
        pages = self.pages if host is None else host.pages
        blocks = self.summary.blocks if host is None else host.blocks
        assert host is None or not (self.pages or any(self.summary.blocks)), "a branch lies in two places"
        assert len(pages) * page_size >= self.kv_len, "a table has entries without a page"
        assert len(set(pages)) == len(pages), "a table holds a page twice"
        assert [len(b) for b in blocks] == [-(-n // page_size) for n in self.summary.lengths], "blocks are off"
        assert self.summary.mean_entries == replace(self.summary).mean_entries, "a summary has grown in place"
        assert self.published <= len(self.pages), "more pages are published than held"
        assert not self.gaps or self.published <= self.gaps[0], "pages behind a gap are published"
        assert self.shared <= len(self.pages), "more pages are shared than held"
        assert self.gaps == sorted(set(self.gaps)), "gaps are out of order"
        assert self.last_gap * page_size <= self.kv_len, "a gap lies behind the end"
