"""Rows to draw from and what must be drawn, reckoned in float64 by sorting: for both bodies of the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.runner.observed import Seen
from thinkfold.types import SamplingParams

Draw = Callable[[Tensor, Tensor, list[SamplingParams]], Tensor]
Floats = NDArray[np.float64]
QWEN_VOCAB = 151_936
NEAR = 2e-6  # of a cumulated probability; a row of fp32 weights is summed to some 1e-7


def logits_of(kind: str, vocab: int, seed: int = 0) -> Tensor:
    """One row `[V]` fp32."""
    if kind == "equal":
        return torch.full((vocab,), 3.0)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    if kind == "ties":
        row = (row * 2).round() / 2
    if kind == "masked":
        row[torch.arange(vocab) % 3 > 0] = -torch.inf
    if kind == "outlier":
        row[vocab // 2] = -3e38
    return row


def distribution(logits: Tensor, params: SamplingParams) -> Floats:
    """Probabilities `[V]` after top-k, then top-p, then min-p; of equals the lower id comes first."""
    x = logits.double().numpy()
    weights = np.exp((x - x.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    if 0 < params.top_k < len(x):
        order = order[: params.top_k]
    before = np.concatenate([[0.0], np.cumsum(weights[order])])
    if params.top_p < 1.0:
        order = order[before[:-1] < params.top_p * before[-1]]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    kept[weights < params.min_p] = 0.0
    return kept / kept.sum()


def knobs_of(params: SamplingParams, vocab: int, u: Floats) -> Tensor:
    """`[5, N]` for so many draws with the same parameters."""
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    rows = [np.full_like(u, params.temperature), u, np.full_like(u, params.top_p), np.full_like(u, params.min_p)]
    return torch.from_numpy(np.stack([*rows, np.full_like(u, top_k)]))


def check_draws(draw: Draw, logits: Tensor, params: SamplingParams, u: Floats, device: str = "cpu") -> None:
    """Every draw is the token whose share of the cumulated probabilities holds its u."""
    vocab = len(logits)
    knobs = knobs_of(params, vocab, u).to(device)
    rows = logits.to(device).expand(len(u), -1)
    ids = draw(rows, knobs, [params] * len(u)).cpu().numpy()
    expected = distribution(logits, params)
    cdf = np.cumsum(expected)
    assert (expected[ids] > 0).all(), (params, ids[expected[ids] == 0])
    assert (cdf[ids] - expected[ids] <= u + NEAR).all() and (u <= cdf[ids] + NEAR).all(), params


def check_seen(seen: Seen, raw: Tensor, num_top: int, tolerance: float) -> None:
    """Statistics of rows of numbers against float64."""
    exact = raw.cpu().double()
    logprobs = exact.log_softmax(-1)
    assert seen.finite.all()
    assert torch.equal(seen.best.cpu(), raw.cpu().amax(-1))
    found = torch.stack([seen.lse, seen.entropy, seen.confidence]).cpu().double()
    wanted = torch.stack(
        [exact.logsumexp(-1), -(logprobs.exp() * logprobs).sum(-1), -logprobs.topk(num_top).values.mean(-1)]
    )
    assert torch.allclose(found, wanted, atol=tolerance, rtol=1e-6), (found - wanted).abs().max()


def settings() -> Iterator[SamplingParams]:
    """Every filter alone, at its ends, and some together."""
    yield SamplingParams(temperature=1.3)
    yield SamplingParams(temperature=0.6, top_p=0.95)
    yield SamplingParams(temperature=2.0, top_p=0.35)
    yield SamplingParams(top_p=1e-6)
    yield SamplingParams(top_k=1)
    yield SamplingParams(temperature=0.7, top_k=20)
    yield SamplingParams(temperature=1.5, min_p=0.1)
    yield SamplingParams(min_p=1.0)
    yield SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
