"""Which entries of a segment stay: scores, the choice over layers and heads, and the budget table counted from it.

Shapes as in `segments`. Everything is a pure function; arithmetic runs in the dtype of its input (fp32 in use).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinkfold.errors import ParameterError
from thinkfold.fold.segments import Segments

CONCLUSION = 16  # the last tokens of a segment, where its result stands


def local_attention(queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax of queries `[..., R, D]` over a segment's keys alone, `[..., R, T]`, and its log-sum-exp `[..., R]`."""
    logits = (queries * scale) @ keys.transpose(-1, -2)
    logs = logits.log_softmax(-1)
    return logs.exp(), logits[..., 0] - logs[..., 0]


def rms_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Root mean square over the rows of the attention that each token draws, `[..., T]`.

    The key score of Attention Matching (arXiv 2602.16284), there called highest attention keys.
    """
    shares = ((queries * scale) @ keys.transpose(-1, -2)).softmax(-1)
    return torch.linalg.vector_norm(shares, dim=-2) * shares.shape[-2] ** -0.5


def importance(segments: Segments) -> Tensor:
    """RMS attention × ‖v‖ of each token, `[F, L, H, T]`: how much of the output it makes, within its segment."""
    return rms_attention(segments.queries, segments.keys, segments.scale) * segments.values.norm(dim=-1)


def segment_share(segments: Segments) -> Tensor:
    """ρ of each row: the share of its softmax over the whole context that falls on the segment, `[F, L, H, R]`.

    For rows whose context is not known it is taken to be the mean of the late ones.
    """
    known, late = segments.context_lse.shape[-1], segments.late * segments.group
    _, lse = local_attention(segments.queries[..., :known, :], segments.keys, segments.scale)
    share = (lse - segments.context_lse).exp().clamp(max=1.0)
    others = segments.queries.shape[-2] - known
    mean = share[..., :late].mean(-1, keepdim=True)
    return torch.cat((share, mean.expand(*share.shape[:-1], others)), -1) if others else share


def uniform_budget(layers: int, kv_heads: int, entries: int) -> Tensor:
    """The same number of entries for every layer and head, `[L, H]`."""
    return torch.full((layers, kv_heads), entries, dtype=torch.long)


def check_budget(budget: Tensor, segments: Segments) -> None:
    """Raise ParameterError unless `budget` is `[L, H]` with numbers in `[0, T]`."""
    if budget.shape != segments.keys.shape[1:3] or budget.is_floating_point():
        raise ParameterError("budget", f"must hold one integer a layer and KV head, got {list(budget.shape)}")
    if int(budget.min()) < 0 or int(budget.max()) > segments.tokens:
        raise ParameterError("budget", f"must stay in [0, {segments.tokens}], the tokens of a segment")


def choose(scores: Tensor, budget: Tensor, conclusion: int = 0, ends: Sequence[int] | None = None) -> Tensor:
    """The best `budget[l, h]` tokens of each head by `scores` `[F, L, H, T]`, `conclusion` tokens before ends first.

    `ends` as in `Segments`; of a conclusion only what lies inside the segment is meant. Returns indices
    `[F, L, H, max(budget)]`, ascending, then −1. Among equals the newest wins.
    """
    tokens, order = scores.shape[-1], ranked(scores, conclusion, ends)
    width = int(budget.max())
    if scores.is_cuda and not budget.is_cuda:
        budget = budget.pin_memory()  # else the host would wait for all that the device has yet to do
    absent = torch.arange(width, device=scores.device) >= budget.to(scores.device, non_blocking=True).unsqueeze(-1)
    chosen = order[..., :width].masked_fill(absent, tokens).sort(-1).values
    return chosen.masked_fill(chosen == tokens, -1)


def ranked(scores: Tensor, conclusion: int = 0, ends: Sequence[int] | None = None) -> Tensor:
    """Tokens `[F, L, H, T]` in the order in which `choose` takes them."""
    newest_first = _protect(scores, conclusion, ends).flip(-1)
    return scores.shape[-1] - 1 - newest_first.argsort(dim=-1, descending=True, stable=True)


def global_counts(scores: Tensor, share: Tensor, entries: int, conclusion: int = 0) -> Tensor:
    """How many tokens each head gets, `[F, L, H]`, when all layers and heads of a fold compete for one budget.

    A token counts as its score `[F, L, H, T]` × its head's mean share ρ (`share`, `[F, L, H, R]`). The budget of a fold
    is `entries` a head on average; the conclusion is taken in every head before the competition. Raises ParameterError
    if the budget does not hold the conclusion or exceeds the segment.
    """
    folds, layers, heads, tokens = scores.shape
    if not min(conclusion, tokens) <= entries <= tokens:
        raise ParameterError("entries", f"must be in [{min(conclusion, tokens)}, {tokens}], got {entries}")
    weighted = _protect(scores * share.mean(-1, keepdim=True), conclusion).reshape(folds, -1)
    best = weighted.topk(entries * layers * heads, dim=-1).indices
    taken = torch.zeros_like(weighted, dtype=torch.long).scatter_(-1, best, 1)
    return taken.view(scores.shape).sum(-1)


def budget_table(counts: Tensor, entries: int, tokens: int, multiple: int) -> Tensor:
    """A static budget `[L, H]` from the counts `[F, L, H]` of many folds, in whole head blocks of `multiple` entries.

    Mean counts, rounded by largest remainder so that the sum is the largest whole number of blocks within
    `entries · L · H`; no head gets more than a segment of `tokens` holds. Raises ParameterError where nothing fits.
    """
    cap = tokens // multiple
    heads = counts.shape[1] * counts.shape[2]
    blocks = entries * heads // multiple
    if not 0 < blocks <= cap * heads:
        raise ParameterError("entries", f"{entries} a head make {blocks} blocks of {multiple}; 1 to {cap * heads} fit")
    mean = counts.double().mean(0).flatten()
    wanted = (mean * (blocks / mean.sum())).tolist()
    given = [min(int(w + 1e-9), cap) for w in wanted]
    for _ in range(blocks - sum(given)):
        best = max((i for i in range(heads) if given[i] < cap), key=lambda i: wanted[i] - given[i])
        given[best] += 1
    return torch.tensor(given).view(counts.shape[1:]) * multiple


def rotate(rows: Tensor, shift: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate queries or keys `[..., R, D]` that carry RoPE by `shift` `[R]` further positions.

    `inv_freq` `[d/2]` is the model's own; the first d dimensions turn, in two halves as transformers' `rotate_half`
    pairs them, and any others stay. Angles are computed in float64.
    """
    half = inv_freq.shape[0]
    angles = shift.double().unsqueeze(-1) * inv_freq.double()
    cos, sin = angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
    first, second, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _protect(scores: Tensor, conclusion: int, ends: Sequence[int] | None = None) -> Tensor:
    protected = scores.clone()
    for end in (scores.shape[-1],) if ends is None else ends:
        protected[..., max(0, end - conclusion) : max(0, end)] = torch.inf
    return protected
