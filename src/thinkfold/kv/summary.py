"""One branch's summaries as plain integers: which head blocks, how many entries. No torch.

A head is a (layer, KV head) pair, numbered `layer * kv_heads + kv_head`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SummaryTable:
    """All summary entries of a branch: per head its head blocks in order and the entries they hold.

    Entries of later folds follow those of earlier ones without a gap, so only a head's last
    block can be partly filled. An entry takes `share` of the memory of a raw one.
    """

    blocks: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    share: float = 1.0
    mean_entries: float = field(init=False)  # raw entries a head that would take as much memory, over all heads

    def __post_init__(self) -> None:
        self.mean_entries = self.share * sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    def upto(self, lengths: list[int], page_size: int) -> SummaryTable:
        """The first `lengths` entries of each head: what the first folds left. Empty: nothing."""
        blocks = [held[: -(-n // page_size)] for held, n in zip(self.blocks, lengths, strict=False)]
        return SummaryTable(blocks, lengths, self.share)


@dataclass(frozen=True, slots=True)
class SummaryGrowth:
    """How one fold makes a summary table longer, or replaces a part of it, one item a head.

    Entry i of a fold in head h is stored at entry `starts[h] + i` of that head, for i below
    `counts[h]`. `new_blocks[h]` are appended to the head's blocks; where the head's last block
    was shared and partly filled, `copies` holds (head, source, target) and the target has taken the
    source's place at index `starts[h] // page_size`.
    """

    counts: list[int]
    starts: list[int]
    new_blocks: list[list[int]]
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (head, source, target)
