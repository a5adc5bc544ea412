"""The slots' raw page tables on the device, brought up to date by what is new in a step.

Rows of a captured step find their pages by their slot, so a step sends only the pages that its rows
have won since their last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinkfold.runner.transfer import to_device
from thinkfold.scheduler.output import BatchRow


class PageTables:
    """`table` `[slots + 1, max_pages]` int32; the line behind the last slot is for rows of padding.

    A list of pages is only ever appended to, and any other change puts a new list in its place
    (`kv.table.PageTable`): a known list has its first pages here already.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.table: Tensor = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
        self._known: list[tuple[list[int], int]] = [([], 0)] * num_slots

    def update(self, rows: Sequence[BatchRow]) -> int:
        """Send what the slots' lines lack; returns how many pages that were."""
        slots: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for row in rows:
            held, slot = row.pages, row.slot
            known, count = self._known[slot]
            if known is not held:
                count = 0
            if (end := len(held)) > count:
                slots += [slot] * (end - count)
                columns += range(count, end)
                pages += held[count:]
                self._known[slot] = (held, end)
        if pages:
            line, column, page = to_device([slots, columns, pages], self.table.device)
            self.table.index_put_((line, column), page.int())
        return len(pages)
