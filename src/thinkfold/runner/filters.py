"""Temperature, top-k, top-p, min-p and the draw itself, without sorting ids.

Order of the filters: top-k, then top-p on what is left renormalised, then min-p against the most
likely token. Among equal logits the lower id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinkfold.types import SamplingParams

# The nucleus of nearly every step fits in this many of the largest logits.
NUCLEUS_TRY = 256


def draw(logits: Tensor, knobs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Token ids `[N]` by inverse CDF over the kept probabilities in id order.

    `logits` `[N, V]` fp32; `knobs` `[5, N]` fp64: temperature (> 0), u in [0, 1), top_p, min_p,
    top_k (V means all). `params` are the same rows on the host, to choose the work to be done.
    """
    temperature, u, top_p, min_p, top_k = knobs
    best = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp((logits - best).double() / temperature[:, None])  # [N, V], 1 at the best
    keep = kept(weights, top_k.long(), top_p, min_p, params)
    if keep is not None:
        weights = weights.masked_fill(~keep, 0.0)
    cdf = weights.cumsum(dim=-1)
    target = u[:, None] * cdf[:, -1:]
    # The first id whose cumulated weight exceeds the target: never one of weight zero.
    token_ids = torch.searchsorted(cdf, target, right=True)[:, 0]
    last = weights.shape[-1] - 1 - weights.flip(-1).gt(0).to(torch.int8).argmax(dim=-1)
    return torch.minimum(token_ids, last)


def kept(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, params: list[SamplingParams]) -> Tensor | None:
    """Mask `[N, V]` of the tokens that survive the filters; None where nothing is filtered.

    `weights` `[N, V]` are probabilities up to a factor per row, 1 for the most likely token.
    """
    keep: Tensor | None = None
    vocab_size = weights.shape[-1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    if any(k < vocab_size for k in limits) or any(p.top_p < 1.0 for p in params):
        keep = _first(weights, *_cut(weights, top_k, top_p, limits, params))
    if any(p.min_p > 0.0 for p in params):
        above = weights >= min_p[:, None]
        keep = above if keep is None else keep & above
    return keep


def _cut(
    weights: Tensor, top_k: Tensor, top_p: Tensor, limits: list[int], params: list[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Smallest kept weight `[N]` and how many tokens of exactly that weight are kept `[N]`."""
    vocab_size = weights.shape[-1]
    open_rows = any(k == vocab_size and p.top_p < 1.0 for k, p in zip(limits, params, strict=True))
    size = max([k for k in limits if k < vocab_size], default=1)
    if open_rows and weights.device.type == "cpu":
        size = max(size, min(NUCLEUS_TRY, vocab_size))
        ordered = weights.topk(size, dim=-1).values
        mass = ordered.sum(dim=-1)
        need = (top_k == vocab_size) & (top_p < 1.0)
        if bool((need & (mass < top_p * weights.sum(dim=-1))).any()):
            ordered = weights.sort(dim=-1, descending=True).values
    elif open_rows:
        ordered = weights.sort(dim=-1, descending=True).values
    else:
        ordered = weights.topk(size, dim=-1).values
    rank = torch.arange(ordered.shape[-1], device=weights.device)
    inside = rank < top_k[:, None]
    cumulated = ordered.masked_fill(~inside, 0.0).cumsum(dim=-1)
    total = torch.where(top_k < vocab_size, cumulated[:, -1], weights.cumsum(dim=-1)[:, -1])
    before = torch.nn.functional.pad(cumulated, (1, -1))
    unlimited = (top_p >= 1.0)[:, None]
    number = (inside & (unlimited | (before < (top_p * total)[:, None]))).sum(dim=-1)
    return _threshold(ordered, number, (top_k == vocab_size) & (top_p >= 1.0))


def _threshold(ordered: Tensor, number: Tensor, everything: Tensor) -> tuple[Tensor, Tensor]:
    least = ordered.gather(1, (number - 1).clamp(min=0)[:, None])[:, 0]
    greater = (ordered > least[:, None]).sum(dim=-1)
    least = torch.where(everything, torch.zeros_like(least), least)
    ties = torch.where(everything, torch.iinfo(torch.int64).max, number - greater)
    return least, ties


def _first(weights: Tensor, least: Tensor, ties: Tensor) -> Tensor:
    """Tokens heavier than `least`, and the `ties` lowest ids of those that equal it."""
    equal = weights == least[:, None]
    return (weights > least[:, None]) | (equal & (equal.cumsum(dim=-1) <= ties[:, None]))
