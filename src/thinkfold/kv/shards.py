"""Which rank a head's blocks lie on, where the KV heads of a model are split over several. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shards:
    """`count` ranks hold equal, adjacent parts of the `kv_heads` of every layer.

    A head is numbered `layer * kv_heads + kv_head`. A page lies on all ranks and lends as many blocks on each, so
    the rank that needs most decides how many pages are opened.
    """

    count: int = 1
    kv_heads: int = 1

    def of(self, head: int) -> int:
        """The rank that holds a head."""
        return head % self.kv_heads * self.count // self.kv_heads

    def totals(self, wanted: Sequence[int]) -> list[int]:
        """Numbers by head, summed by rank."""
        if self.count == 1:
            return [sum(wanted)]
        own, every = self.kv_heads // self.count, range(0, len(wanted), self.kv_heads)
        return [sum(sum(wanted[i + rank * own : i + (rank + 1) * own]) for i in every) for rank in range(self.count)]

    def pages(self, wanted: Sequence[int], page_blocks: int) -> int:
        """Pages that blocks by head fill, of which each lends `page_blocks` over all ranks."""
        return -(-max(self.totals(wanted)) // (page_blocks // self.count))
