"""Whether a fold may be made: how wrong attention gets, as seen by queries that had no part in the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from thinkfold.fold.compaction import local_attention
from thinkfold.fold.segments import Entries, Segments, Summary, attend


def estimate(held_out: Segments, summary: Summary | Entries) -> Tensor:
    """Relative error of the attention output over the whole context, one number in `[0, 1]` a fold, `[F]`."""
    return error_of(squares(held_out, summary))


def error_of(squares: Tensor) -> Tensor:
    """What `squares` `[F, L, 2]` of all heads come to, `[F]`: those of some heads and of others may be added."""
    by_layer = squares[..., 0] / squares[..., 1].clamp(min=torch.finfo(squares.dtype).tiny)
    return by_layer.sqrt().clamp(max=1.0).mean(-1)


def squares(held_out: Segments, summary: Summary | Entries) -> Tensor:
    """The error and the attention output over the whole context, squared and summed over rows and heads, `[F, L, 2]`.

    `held_out` holds the segments with queries that the selector has not seen; only the late ones are read. Where memory
    keeps a summary in fewer bits, its entries as they read back stand in its place. With o_B and
    ρ a segment's output and share of the softmax, o_R the output over the rest, and hats for a summary in its place,

        o = ρ o_B + (1 − ρ) o_R,    ô − o = ρ̂ (ô_B − o_B) + (ρ̂ − ρ)(o_B − o_R)

    are exact, and so is ρ̂, since the mass of the rest is that of the context less the segment's. o_R is not at hand:
    it is taken to be as long as o_B is in that head (root mean square over the rows), at right angles to whatever the
    segment gives. A summary that keeps everything has error 0; that of dropping a segment grows with ρ.

    Squares are summed over the rows and heads of a layer, whose output projection mixes them; the result is the mean
    over layers.
    """
    rows = held_out.late_queries
    shares, lse = local_attention(rows, held_out.keys, held_out.scale)
    output = shares @ held_out.values
    left = summary.entries(held_out.keys, held_out.values) if isinstance(summary, Summary) else summary
    folded, folded_lse = attend(rows, left, held_out.scale)
    known = held_out.context_lse[..., : rows.shape[-2]]
    share = (lse - known).exp().clamp(max=1.0 - torch.finfo(rows.dtype).eps)
    folded_share = (folded_lse - lse + share.logit()).sigmoid()

    length = output.square().sum(-1).mean(-1, keepdim=True)  # of o_R, squared
    moved = folded_share.unsqueeze(-1) * folded - share.unsqueeze(-1) * output
    error = moved.square().sum(-1) + (folded_share - share).square() * length
    whole = (share.unsqueeze(-1) * output).square().sum(-1) + (1.0 - share).square() * length
    return torch.stack([error.sum((-2, -1)), whole.sum((-2, -1))], -1)
