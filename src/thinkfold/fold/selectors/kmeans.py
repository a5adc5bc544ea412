"""A few exact entries and centroids with mass for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import check_budget, choose, importance, segment_share
from thinkfold.fold.fit import fit_pooled, log_counts, pool
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class Kmeans:
    """A quarter of the budget exact by RMS attention × ‖v‖, the rest centroids of the other keys, fitted.

    Clusters are weighted by the attention their tokens draw; β starts from the log of a cluster's tokens, values from
    their mean. Source: clustered attention (Vyas et al., arXiv 2007.04825) and ThinKV's k-means of thoughts
    (arXiv 2510.01290), with the fit of Attention Matching (arXiv 2602.16284).
    """

    iterations: int = 4

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        budget = budget.to(segments.keys.device)
        score = importance(segments)
        indices = choose(score, budget // 4)
        if not budget.any():
            return Summary(indices)
        free = torch.ones_like(score, dtype=torch.bool)
        padded = torch.cat((free, free[..., :1]), dim=-1)
        free = padded.scatter(-1, indices.masked_fill(indices < 0, segments.tokens), False)[..., :-1]
        members = self._cluster(segments.keys, free, score + score.mean(-1, keepdim=True) * 1e-3, budget - budget // 4)
        weights = members * score.unsqueeze(-2).clamp(min=torch.finfo(score.dtype).tiny)
        keys, values = pool(segments.keys, weights), pool(segments.values, weights)
        share = segment_share(segments)
        return Summary(indices, fit_pooled(segments, indices, share, keys, values, log_counts(members), refit=True))

    def _cluster(self, keys: Tensor, free: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Membership `[F, L, H, P, T]` of weighted k-means over the free tokens, seeded at equal distances."""
        number = torch.arange(int(counts.max()), device=keys.device)
        exists = number < counts.unsqueeze(-1)  # [L, H, P]
        rank = free.cumsum(-1) - 1
        seed = number * free.sum(-1, keepdim=True) // counts.clamp(min=1).unsqueeze(-1)
        at = torch.searchsorted(rank.contiguous(), seed.contiguous()).clamp(max=keys.shape[-2] - 1)
        centres = keys.gather(-2, at.unsqueeze(-1).expand(*at.shape, keys.shape[-1]))
        members = torch.zeros(())
        for _ in range(self.iterations):
            distance = centres.square().sum(-1, keepdim=True) - 2.0 * centres @ keys.transpose(-1, -2)
            nearest = distance.masked_fill(~exists.unsqueeze(-1), torch.inf).argmin(-2, keepdim=True)
            members = (nearest == number.unsqueeze(-1)) & free.unsqueeze(-2) & exists.unsqueeze(-1)
            members = members.to(keys)
            centres = torch.where(
                members.sum(-1, keepdim=True) > 0, pool(keys, members * weight.unsqueeze(-2)), centres
            )
        return members
