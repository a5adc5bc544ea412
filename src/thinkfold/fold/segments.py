"""What goes into a fold and what comes out of it, and attention over both.

Shapes: folds F, layers L, kv_heads H, tokens T of a segment, rows R of reference queries, head_dim D. All segments
of a batch are equally long. Keys and queries are as attention sees them: after RoPE and any norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Segments:
    """Raw KV of finished segments and the queries that judge it. Raises ParameterError for shapes that do not fit.

    `queries` hold the `group` query heads of one KV head side by side (row = position · group + head), the `late`
    first positions are real queries from after the segment in their order, the rest stand for the future.
    `context_lse` is the log-sum-exp of a row's scaled logits over everything it sees, the segment included: of the late
    rows at least, in order; of rows behind those that it covers it is not known.
    `ends` say where stretches of thinking end, as numbers of tokens from the segment's start; an end may lie up to a
    page behind the segment or at its start, since folds are made of whole pages. None means the segment's own end.
    """

    keys: Tensor  # [F, L, H, T, D]
    values: Tensor  # [F, L, H, T, D]
    queries: Tensor  # [F, L, H, R, D]
    context_lse: Tensor  # [F, L, H, late · group to R]
    late: int
    group: int
    scale: float
    ends: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.keys.dim() != 5 or not self.keys.shape[3]:
            raise ParameterError("keys", f"must be [folds, layers, kv_heads, tokens, dim], got {_shape(self.keys)}")
        if self.values.shape != self.keys.shape:
            raise ParameterError("values", f"must have the shape of keys, got {_shape(self.values)}")
        rows = self.queries.shape[3] if self.queries.dim() == 5 else 0
        if self.queries.shape != (*self.keys.shape[:3], rows, self.keys.shape[4]):
            raise ParameterError("queries", f"must be [folds, layers, kv_heads, rows, dim], got {_shape(self.queries)}")
        if self.group < 1 or rows % self.group:
            raise ParameterError("group", f"must divide the {rows} rows, got {self.group}")
        if not 1 <= self.late * self.group <= rows:
            raise ParameterError("late", f"must be between 1 and {rows // self.group} positions, got {self.late}")
        known = self.context_lse.shape[3] if self.context_lse.dim() == 4 else 0
        if self.context_lse.shape != (*self.keys.shape[:3], known) or not self.late * self.group <= known <= rows:
            raise ParameterError("context_lse", f"must have one number a late row, got {_shape(self.context_lse)}")

    @property
    def tokens(self) -> int:
        """Tokens of each segment."""
        return self.keys.shape[3]

    @property
    def late_queries(self) -> Tensor:
        """The real queries from after the segment, `[F, L, H, late · group, D]`."""
        return self.queries[..., : self.late * self.group, :]


@dataclass(frozen=True, slots=True)
class Entries:
    """Keys and values to attend to, `[..., E, D]`; `bias` is added to their logits, absent ones are −inf there."""

    keys: Tensor
    values: Tensor
    bias: Tensor  # [..., E]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Entries that stand for several tokens: `bias` is β, the log of how much; −inf marks an absent one."""

    keys: Tensor  # [F, L, H, P, D]
    values: Tensor  # [F, L, H, P, D]
    bias: Tensor  # [F, L, H, P]


@dataclass(frozen=True, slots=True)
class Summary:
    """What is left of segments: exact entries by index, copied as they are, and pooled ones where a selector makes any.

    `indices` `[F, L, H, E]` ascend along the last axis and end in −1 where a head has fewer than the widest.
    """

    indices: Tensor
    pooled: Pooled | None = None

    @property
    def counts(self) -> Tensor:
        """Entries of each head, `[F, L, H]`."""
        exact = (self.indices >= 0).sum(-1)
        return exact if self.pooled is None else exact + self.pooled.bias.isfinite().sum(-1)

    def entries(self, keys: Tensor, values: Tensor) -> Entries:
        """The summary as keys, values and bias; `keys` and `values` are those of the segments, `[F, L, H, T, D]`."""
        exact_bias = torch.zeros(self.indices.shape, dtype=keys.dtype, device=keys.device)
        exact_bias.masked_fill_(self.indices < 0, -torch.inf)
        exact = Entries(take(keys, self.indices), take(values, self.indices), exact_bias)
        if self.pooled is None:
            return exact
        return Entries(
            torch.cat((exact.keys, self.pooled.keys.to(keys.dtype)), dim=-2),
            torch.cat((exact.values, self.pooled.values.to(values.dtype)), dim=-2),
            torch.cat((exact.bias, self.pooled.bias.to(keys.dtype)), dim=-1),
        )


def take(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows `[..., T, D]` at `indices` `[..., E]`; −1 gives a row of zeros."""
    wide = indices.clamp(min=0).unsqueeze(-1).expand(*indices.shape, rows.shape[-1])
    return rows.gather(-2, wide).masked_fill((indices < 0).unsqueeze(-1), 0.0)


def attend(queries: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of `[..., R, D]` over entries: output `[..., R, D]` and log-sum-exp `[..., R]`.

    A row that sees no entry gives zeros and −inf, so that it disappears in `join`.
    """
    logits = queries @ entries.keys.transpose(-1, -2) * scale + entries.bias.unsqueeze(-2)
    lse = logits.logsumexp(-1)
    shares = (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return shares @ entries.values, lse


def join(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of attention over disjoint entries as those over their union."""
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    shares = (lses - total.masked_fill(total == -torch.inf, 0.0)).exp()
    return (shares.unsqueeze(-1) * torch.stack([out for out, _ in parts])).sum(0), total


def raw_entries(keys: Tensor, values: Tensor) -> Entries:
    """Raw KV as entries without bias."""
    return Entries(keys, values, torch.zeros(keys.shape[:-1], dtype=keys.dtype, device=keys.device))


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
