"""Attention alone: what the newest queries look at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d

from thinkfold.fold.compaction import check_budget, choose, local_attention
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class Snap:
    """Mean attention of the last `window` late positions over their heads, smoothed over neighbours; exact copies.

    Source: SnapKV (Li et al., arXiv 2404.14469). Its window itself stays raw anyway, since it lies after the segment.
    """

    window: int = 64
    smooth: int = 5

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        rows = segments.late_queries[..., -self.window * segments.group :, :]
        drawn = local_attention(rows, segments.keys, segments.scale)[0].mean(-2)
        smoothed = avg_pool1d(
            drawn.flatten(0, -2), self.smooth, stride=1, padding=self.smooth // 2, count_include_pad=False
        )
        return Summary(choose(smoothed.view(drawn.shape), budget))
