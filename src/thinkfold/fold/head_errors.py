"""What each head's output loses when a fold keeps so many tokens of a segment, and the budget that loses least.

Measured with queries that really came later, so only where a text is known to its end: in a calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinkfold.errors import ParameterError
from thinkfold.fold.compaction import uniform_budget
from thinkfold.fold.fit import remainder
from thinkfold.fold.segments import Pooled, Segments

SMALL = 1e-6  # of a softmax
CLEARLY = 0.9  # of the other way's error
FEW = 64  # entries of a head beside which it is asked whether a pooled one would do better


@dataclass(frozen=True, slots=True)
class Future:
    """Queries `[L, H, group, n, D]` from after a segment; of all that each of them sees, the segment included, its
    output `[L, H, group, n, D]` and the log-sum-exp of its scaled logits `[L, H, group, n]`."""

    queries: Tensor
    outputs: Tensor
    lse: Tensor


def head_errors(
    segments: Segments, order: Tensor, future: Future, kept: Sequence[int], pooled: Sequence[Pooled | None]
) -> Tensor:
    """Error of each query head, `[L, H, group, len(kept)]`, where the first `kept[i]` tokens of one fold stay.

    `order` `[L, H, T]` are tokens as they are chosen, the best first; `kept` ascends; beside them stand the entries of
    `pooled[i]`, if any. The error is the mean over queries of ‖ô − o‖² of the whole attention output, with all
    but the segment raw. Times the mean squared gradient of the loss by that output it says, to second order, what the
    fold costs.
    """
    dim, found = segments.keys.shape[-1], []
    for layer, tokens in enumerate(order):
        wide = tokens.unsqueeze(-1).expand(*tokens.shape, dim)
        queries, lse = future.queries[layer], future.lse[layer].unsqueeze(-1)
        keys, values = (rows[0, layer].gather(1, wide).unsqueeze(1) for rows in (segments.keys, segments.values))
        shares = (queries @ keys.transpose(-1, -2) * segments.scale - lse).exp()  # of the whole softmax, [H, g, n, T]
        output, mass = future.outputs[layer] - shares @ values, 1.0 - shares.sum(-1)
        errors, first = [], 0
        for last, stand in zip(kept, pooled, strict=True):
            part = shares[..., first:last]
            output, mass, first = output + part @ values[:, :, first:last], mass + part.sum(-1), last
            seen, total = output, mass
            if stand is not None:
                rows, means, bias = (x[0, layer].unsqueeze(1) for x in (stand.keys, stand.values, stand.bias))
                part = (queries @ rows.transpose(-1, -2) * segments.scale + bias.unsqueeze(-2) - lse).exp()
                seen, total = output + part @ means, mass + part.sum(-1)
            wrong = seen / total.clamp(min=SMALL).unsqueeze(-1) - future.outputs[layer]
            errors.append(wrong.square().sum(-1).mean(-1))
        found.append(torch.stack(errors, -1))
    return torch.stack(found)


def both_ways(segments: Segments, order: Tensor, future: Future, kept: Sequence[int]) -> Tensor:
    """`head_errors` of `kept[i]` exact tokens, and of one token less beside one entry that stands for all others:
    `[2, L, H, group, len(kept)]`. Where none or more than `FEW` are kept both are the same."""
    layers, heads, _ = order.shape
    one = uniform_budget(layers, heads, 1)
    beside = [0 < count <= FEW for count in kept]
    fewer = [count - one_less for count, one_less in zip(kept, beside, strict=True)]
    pooled = [
        remainder(segments, order[None, ..., :exact].sort(-1).values, one) if wanted else None
        for exact, wanted in zip(fewer, beside, strict=True)
    ]
    none = [None] * len(kept)
    return torch.stack(
        [head_errors(segments, order, future, kept, none), head_errors(segments, order, future, fewer, pooled)]
    )


def least_error_of_both(errors: Tensor, kept: Sequence[int], entries: int) -> tuple[Tensor, Tensor]:
    """`least_error` of the better of `errors` `[2, L, H, len(kept)]`, and heads whose last entry is a pooled one,
    `[L, H]` of 0 and 1: where that is clearly better."""
    given = least_error(errors.amin(0), kept, entries)
    at = torch.searchsorted(torch.tensor(kept), given, right=True).sub(1).unsqueeze(-1)
    exact, pooled = (one.gather(-1, at).squeeze(-1) for one in errors)
    return given, (pooled < CLEARLY * exact).long() * (given > 0)


def least_error(errors: Tensor, kept: Sequence[int], entries: int) -> Tensor:
    """How many entries each head gets, `[L, H]`, so that errors `[L, H, len(kept)]` add up to as little as can be.

    `kept` are the numbers that a head may keep, in steps of equal size or multiples of it; every head gets `kept[0]` at
    least, and together they get `entries` a head, or what is next below. Greedy along the lower convex envelope of each
    head's errors, which is optimal where no head stops inside an edge of it. Raises ParameterError if there are not
    enough for `kept[0]` or more than `kept[-1]`.
    """
    if not kept[0] <= entries <= kept[-1]:
        raise ParameterError("entries", f"must be in [{kept[0]}, {kept[-1]}], got {entries}")
    layers, heads, _ = errors.shape
    step = min((b - a for a, b in pairwise(kept)), default=1)
    gains = [
        (gain, -head)
        for head, row in enumerate(errors.flatten(0, 1).tolist())
        for gain, steps in _edges(row, kept, step)
        for _ in range(steps)
    ]
    given = torch.full((layers * heads,), kept[0])
    for _, head in sorted(gains, reverse=True)[: (entries - kept[0]) * layers * heads // step]:
        given[-head] += step
    return given.view(layers, heads)


def _edges(errors: Sequence[float], kept: Sequence[int], step: int) -> list[tuple[float, int]]:
    """What a step gains along each edge of the lower convex envelope, and how many steps it has."""
    hull: list[tuple[int, float]] = []
    for x, y in zip(kept, errors, strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return [(-_slope(a, b) * step, (b[0] - a[0]) // step) for a, b in pairwise(hull)]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
