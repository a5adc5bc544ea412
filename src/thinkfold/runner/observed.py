"""Statistics of raw logits, whatever is drawn from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinkfold.runner.invariance import row_sums


class Seen(NamedTuple):
    """What raw logits say, all `[R]`: whether every one is a number, the largest, the logarithm of the sum of their
    exponentials, entropy in nats, and the mean negative log-prob of the most likely tokens."""

    finite: Tensor
    best: Tensor
    lse: Tensor
    entropy: Tensor
    confidence: Tensor


def observe(raw: Tensor, num_top: int) -> Seen:
    """`raw` `[R, V]` (any float dtype); `num_top` tokens make the confidence."""
    raw = raw.float()
    least, best = raw.aminmax(dim=-1)
    finite = (best < torch.inf) & (least > -torch.inf)  # NaN is neither
    below = raw - best[:, None]
    weights = below.exp()
    total = row_sums(weights)
    spread = total.log()
    entropy = spread - row_sums(weights.mul_(below)) / total
    lse = best + spread
    return Seen(finite, best, lse, entropy, lse - raw.topk(num_top, dim=-1).values.mean(dim=-1))
