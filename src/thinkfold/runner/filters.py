"""Temperature, top-k, top-p, min-p and the draw itself, without sorting ids.

Order of the filters: top-k, then top-p on what is left renormalised, then min-p against the most
likely token. Among equal logits the lower id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinkfold.runner.invariance import row_sums
from thinkfold.types import SamplingParams

# On a CPU: the nucleus of nearly every step fits in so many of the largest weights, else in so many.
NUCLEUS_TRIES = (24, 256)


def draw(logits: Tensor, knobs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Token ids `[N]` by inverse CDF over the kept probabilities in id order.

    `logits` `[N, V]` (any float dtype); `knobs` `[5, N]` fp64: temperature (> 0), u in [0, 1), top_p, min_p,
    top_k (V means all). `params` are the same rows on the host, to choose the work to be done.
    """
    temperature, u, top_p, min_p, top_k = knobs
    logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)
    weights = (logits - best).double().div_(temperature[:, None]).exp_()  # [N, V], 1 at the best
    keep = kept(weights, top_k.long(), top_p, min_p, params)
    if keep is not None:
        weights *= keep
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1]
    # The first id whose cumulated weight exceeds the target: never one of weight zero, and there always is one.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    token_ids = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    return token_ids.clamp_(max=weights.shape[-1] - 1)  # of a row that is not finite


def kept(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, params: list[SamplingParams]) -> Tensor | None:
    """Mask `[N, V]` of the tokens that survive the filters; None where nothing is filtered.

    `weights` `[N, V]` are probabilities up to a factor per row, 1 for the most likely token.
    """
    keep: Tensor | None = None
    vocab_size = weights.shape[-1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    if any(k < vocab_size for k in limits) or any(p.top_p < 1.0 for p in params):
        keep = _heaviest(weights, top_k, top_p, limits, params)
    if any(p.min_p > 0.0 for p in params):
        above = weights >= min_p[:, None]
        keep = above if keep is None else keep & above
    return keep


def _heaviest(weights: Tensor, top_k: Tensor, top_p: Tensor, limits: list[int], params: list[SamplingParams]) -> Tensor:
    """Mask `[N, V]` of what top-k and top-p keep; among equal weights the lowest ids."""
    vocab_size = weights.shape[-1]
    on_cpu = weights.device.type == "cpu"
    ordered, number = _count(weights, top_k, top_p, _sizes(vocab_size, limits, params, on_cpu=on_cpu))
    least = ordered.gather(1, (number - 1).clamp(min=0)[:, None])
    everything = ((top_k == vocab_size) & (top_p >= 1.0))[:, None]
    least = least.masked_fill(everything, 0.0)
    if on_cpu:
        all_equals = (ordered >= least).sum(dim=-1) == number
        seen = (ordered[:, -1:] < least) if ordered.shape[-1] < vocab_size else torch.ones_like(everything)
        if bool((everything[:, 0] | (all_equals & seen[:, 0])).all()):
            return weights >= least
    ties = number[:, None] - (ordered > least).sum(dim=-1, keepdim=True)
    ties = ties.masked_fill(everything, vocab_size)
    equal = weights == least
    return (weights > least) | (equal & (equal.cumsum(dim=-1) <= ties))


def _sizes(vocab_size: int, limits: list[int], params: list[SamplingParams], *, on_cpu: bool) -> list[int]:
    """How many of the largest weights to look at, and how many where these are too few; the last is enough."""
    # one more than top-k keeps: the last kept one may have equals
    least = min(vocab_size, 1 + max([k for k in limits if k < vocab_size], default=0))
    if not any(k == vocab_size and p.top_p < 1.0 for k, p in zip(limits, params, strict=True)):
        return [least]
    tries = [max(least, size) for size in NUCLEUS_TRIES if size < vocab_size] if on_cpu else []
    return [*tries, vocab_size]


def _count(weights: Tensor, top_k: Tensor, top_p: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The largest weights in order `[N, size]`, and how many of them top-k and top-p keep `[N]`."""
    total = row_sums(weights)
    for size in sizes[:-1]:
        ordered, number, short = _look(weights, total, top_k, top_p, size)
        if not bool(short.any()):
            return ordered, number
    return _look(weights, total, top_k, top_p, sizes[-1])[:2]


def _look(weights: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_count` by the `size` largest weights, and for which rows these do not hold the nucleus `[N]`."""
    vocab_size = weights.shape[-1]
    ordered = weights.topk(size, dim=-1).values if size < vocab_size else weights.sort(dim=-1, descending=True).values
    inside = torch.arange(size, device=weights.device) < top_k[:, None]
    cumulated = ordered.masked_fill(~inside, 0.0).cumsum(dim=-1)
    bounded, unlimited = top_k < vocab_size, top_p >= 1.0
    wanted = top_p * torch.where(bounded, cumulated[:, -1], total)
    before = torch.nn.functional.pad(cumulated, (1, -1))
    number = (inside & (unlimited[:, None] | (before < wanted[:, None]))).sum(dim=-1)
    return ordered, number, ~bounded & ~unlimited & (cumulated[:, -1] < wanted)
