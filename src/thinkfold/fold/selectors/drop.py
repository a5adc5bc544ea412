"""Forget the segment: the floor that every other selector must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import check_budget
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class Drop:
    """No entry at all, whatever the budget. Source: sliding-window attention, which forgets what leaves the window."""

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        shape = (*segments.keys.shape[:3], 0)
        return Summary(torch.zeros(shape, dtype=torch.long, device=segments.keys.device))
