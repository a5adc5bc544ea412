"""Neighbours merged by an exponential moving average, read at equal distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import check_budget
from thinkfold.fold.fit import log_counts, pool, stretches
from thinkfold.fold.segments import Pooled, Segments, Summary


@dataclass(frozen=True, slots=True)
class Ema:
    """Keys and values run through a moving average of the span of one stretch, which is read at each stretch's end.

    β is the log of the stretch's tokens. Source: neighbour merging as in KVMerger (arXiv 2407.08454), with the decay of
    Mega's moving average (arXiv 2209.10655) for its Gaussian weights.
    """

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        tokens, device = segments.tokens, segments.keys.device
        membership = stretches(tokens, budget.to(device))
        position = torch.arange(tokens, device=device)
        end = (membership * position).amax(-1, keepdim=True)
        span = tokens / budget.to(device).clamp(min=1)
        decay = 1.0 - 2.0 / (span[..., None, None] + 1.0)
        age = end - position
        weights = torch.where(age >= 0, decay ** age.clamp(min=0), 0.0).to(segments.keys)
        keys, values = pool(segments.keys, weights), pool(segments.values, weights)
        bias = log_counts(membership.to(segments.keys)).expand(keys.shape[:-1])
        return Summary(bias[..., :0].long(), Pooled(keys, values, bias))
