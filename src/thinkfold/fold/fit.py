"""Pooled entries: what they stand for, how much mass they carry, what value they hold. Shapes as in `segments`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinkfold.fold.compaction import local_attention, rms_attention, segment_share
from thinkfold.fold.segments import Pooled, Segments, take

MASS_BOX = (math.exp(-7.0), math.exp(9.0))
RIDGE = 1e-2
NEWTON_STEPS = 6


def stretches(tokens: int, budget: Tensor) -> Tensor:
    """Cut `tokens` into `budget[l, h]` equal stretches: membership `[L, H, max(budget), T]` of 0 and 1."""
    which = torch.arange(tokens, device=budget.device) * budget.unsqueeze(-1) // tokens
    numbers = torch.arange(int(budget.max()), device=budget.device).unsqueeze(-1)
    return ((which.unsqueeze(-2) == numbers) & (budget[..., None, None] > 0)).float()


def pool(rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted means of rows `[..., T, D]` under `weights` `[..., P, T]`; no weight at all gives zeros."""
    return weights @ rows / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)


def log_counts(membership: Tensor) -> Tensor:
    """Log of the number of tokens of each pooled entry, `[..., P]`; −inf for an empty one."""
    return membership.sum(-1).log()


def fit_mass(shares: Tensor, target: Tensor, start: Tensor, weights: Tensor, ridge: float = RIDGE) -> Tensor:
    """β of pooled entries, so that they carry the mass that reference queries put on what they stand for.

    `shares` `[..., R, P]`: exp(q·k_j) over the segment's mass; `target` `[..., R]`: what they must add up to; `start`
    `[..., P]`: first guess of β, and what the ridge pulls to (−inf stays −inf); `weights` `[..., R]`: of the rows.
    Minimises Σ_i ω_i² (Σ_j s_ij w_j − m_i)² + λ Σ_j (w_j / w⁰_j − 1)², β = log w, e^−7 ≤ w ≤ e^9 (the mass term of
    Attention Matching, arXiv 2602.16284, with a log-count start and a wider box) by projected Newton steps (Bertsekas,
    SIAM J. Control Optim. 20, 1982): weights that press against their box are held, the others are solved for. In
    float64, since the squares of shares are badly conditioned.
    """
    dtype = start.dtype
    shares, target, start, weights = shares.double(), target.double(), start.double(), weights.double()
    first = start.exp()
    columns = shares * weights.unsqueeze(-1) * first.unsqueeze(-2)
    gram = columns.transpose(-1, -2) @ columns
    penalty = _damping(gram, ridge)
    hessian = gram + torch.diag_embed(penalty.expand(first.shape))
    goal = (columns * (target * weights).unsqueeze(-1)).sum(-2) + penalty
    low, high = (bound / first.where(first > 0, 1.0) for bound in MASS_BOX)
    scaled = torch.ones_like(first).clamp(low, high)
    for _ in range(NEWTON_STEPS):
        slope = (hessian @ scaled.unsqueeze(-1)).squeeze(-1) - goal
        held = ((scaled <= low) & (slope > 0)) | ((scaled >= high) & (slope < 0))
        free = (~held).to(slope)
        among_free = hessian * free.unsqueeze(-1) * free.unsqueeze(-2) + torch.diag_embed(1.0 - free)
        scaled = (scaled + _solve(among_free, -(slope * free).unsqueeze(-1)).squeeze(-1)).clamp(low, high)
    return torch.where(first > 0, (first * scaled).log(), -torch.inf).to(dtype)


def refit_values(shares: Tensor, missing: Tensor, values: Tensor, weights: Tensor, ridge: float = RIDGE) -> Tensor:
    """Values `[..., P, D]` of pooled entries, moved by ridge regression so that the segment's output is met.

    `shares` `[..., R, P]`: each pooled entry's share of the summary's softmax; `missing` `[..., R, D]`: the output that
    is still wrong with `values`; `weights` `[..., R]` of the rows. The ridge pulls toward `values` (cluster means), not
    to zero: with few queries an unridged fit blows up. In float64, as the mass.
    """
    shares, weighted = shares.double(), (shares * weights.unsqueeze(-1)).double().transpose(-1, -2)
    gram = weighted @ shares
    damped = gram + torch.diag_embed(_damping(gram, ridge).expand(gram.shape[:-1]))
    return values + _solve(damped, weighted @ missing.double()).to(values.dtype)


def fit_pooled(
    segments: Segments, indices: Tensor, share: Tensor, keys: Tensor, values: Tensor, start: Tensor, *, refit: bool
) -> Pooled:
    """Mass, and with `refit` values, of pooled entries that stand for all tokens outside the exact ones.

    `indices` `[F, L, H, E]` are the exact entries (β 0, own values; never fitted), `share` is ρ `[F, L, H, R]`, `keys`
    and `values` `[F, L, H, P, D]` are the first guess and `start` `[F, L, H, P]` its β.
    """
    attention, lse = local_attention(segments.queries, segments.keys, segments.scale)
    exact = attention.gather(-1, indices.clamp(min=0).unsqueeze(-2).expand(*attention.shape[:-1], indices.shape[-1]))
    exact = exact.masked_fill((indices < 0).unsqueeze(-2), 0.0)
    pooled = (segments.queries @ keys.transpose(-1, -2) * segments.scale - lse.unsqueeze(-1)).exp()
    pooled = pooled.masked_fill(start.isneginf().unsqueeze(-2), 0.0)  # padding: its zero key may be beyond floats
    left = (1.0 - exact.sum(-1)).clamp(min=0.0)
    bias = fit_mass(pooled, left, start, _floored(share * (1.0 - share)))
    if not refit:
        return Pooled(keys, values, bias)
    pooled = pooled * bias.exp().unsqueeze(-2)
    total = (exact.sum(-1) + pooled.sum(-1)).clamp(min=torch.finfo(pooled.dtype).tiny).unsqueeze(-1)
    output = (exact @ take(segments.values, indices) + pooled @ values) / total
    fitted = refit_values(pooled / total, attention @ segments.values - output, values, _floored(share.square()))
    low, high = segments.values.amin(-2, keepdim=True), segments.values.amax(-2, keepdim=True)
    middle, reach = (low + high) / 2, high - low  # twice the range the segment has in each channel
    return Pooled(keys, fitted.clamp(middle - reach, middle + reach), bias)


def remainder(segments: Segments, exact: Tensor, counts: Tensor) -> Pooled:
    """`counts` `[L, H]` entries that stand for all tokens but the exact ones, each for an equal stretch of the segment.

    Keys and values are means under the attention that tokens draw; β is fitted. Values are not: one entry for hundreds
    of tokens is judged by few queries, and a refit follows those too closely.
    """
    free = torch.ones_like(segments.keys[..., 0], dtype=torch.bool)
    padded = torch.cat((free, free[..., :1]), dim=-1)
    free = padded.scatter(-1, exact.masked_fill(exact < 0, segments.tokens), False)[..., :-1]
    members = stretches(segments.tokens, counts.to(segments.keys.device)).to(segments.keys) * free.unsqueeze(-2)
    weights = members * rms_attention(segments.queries, segments.keys, segments.scale).unsqueeze(-2)
    keys, values = pool(segments.keys, weights), pool(segments.values, weights)
    return fit_pooled(segments, exact, segment_share(segments), keys, values, log_counts(members), refit=False)


def _floored(weights: Tensor) -> Tensor:
    floor = 0.05 * weights.median(dim=-1, keepdim=True).values
    return weights.maximum(floor).clamp(min=torch.finfo(weights.dtype).eps)


def _damping(gram: Tensor, ridge: float) -> Tensor:
    """`ridge` times the mean of the diagonal, `[..., 1]`; never so small that it is lost in rounding."""
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    return (ridge * size).clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Positive definite systems by Cholesky; MKL's LU with more threads than one fails for a batch of some 200 rows."""
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))
