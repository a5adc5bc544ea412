"""Importance against redundancy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from thinkfold.fold.compaction import check_budget, choose, local_attention
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class Rkv:
    """Exact copies by Z = λ·importance − (1 − λ)·redundancy.

    Importance: attention of the last `window` late positions, the most of the group's heads, max-pooled. Redundancy:
    softmax of the mean cosine to other keys beyond `similar`; of near copies the newest does not count as redundant.
    Source: R-KV (Cai et al., arXiv 2505.24133).
    """

    window: int = 8
    smooth: int = 7
    mix: float = 0.1
    similar: float = 0.5

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        rows = segments.late_queries[..., -self.window * segments.group :, :]
        shares, _ = local_attention(rows, segments.keys, segments.scale)
        by_head = shares.unflatten(-2, (-1, segments.group)).amax(-2).mean(-2)
        pooled = max_pool1d(by_head.flatten(0, -2), self.smooth, stride=1, padding=self.smooth // 2)
        score = self.mix * pooled.view(by_head.shape) - (1.0 - self.mix) * self._redundancy(segments.keys)
        return Summary(choose(score, budget))

    def _redundancy(self, keys: Tensor) -> Tensor:
        unit = normalize(keys, dim=-1)
        cosine = unit @ unit.transpose(-1, -2)
        position = torch.arange(keys.shape[-2], device=keys.device)
        cosine = cosine.masked_fill(position == position.unsqueeze(-1), 0.0)
        near = cosine > self.similar
        newest = torch.where(near, position, -1).amax(-1, keepdim=True)  # of each key's copies, which is the last?
        cosine = cosine.masked_fill(~near | (position == newest), 0.0)
        return cosine.mean(-2).softmax(-1)
