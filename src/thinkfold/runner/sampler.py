"""From logits to tokens: statistics on raw logits, then the user's changes, then the draw.

It works on all rows at once and never waits for the device. A row's token is a function of its
own logits, parameters and counter: neighbours change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.runner import filters, penalties, rng
from thinkfold.runner.invariance import row_sums
from thinkfold.runner.penalties import Penalties
from thinkfold.scheduler.output import SampleRow

IntArray = NDArray[np.int64]
CONFIDENCE_TOKENS = 20
NUM_STATS = 4


class SamplerInputs(NamedTuple):
    """Sampling parameters of R rows as int64 arrays (floats as their bits), on host or device.

    `edits` `[2, E]` and `edit_values` `[E]`: (row, id) logits that a bias is added to;
    `bans` `[2, n]`: (row, id) logits set to -inf; `random_rows` `[N]` rows with temperature > 0,
    `knobs` `[5, N]`: temperature, u, top_p, min_p, top_k; `forced` `[2, F]`: (row, id);
    `top_rows` rows that want the most likely ids; `masks` `[M, ceil(V / 64)]`: the tokens that
    `masked_rows` `[M]` may draw, a bit each. The rest is `penalties.pack`.
    """

    edits: Tensor
    edit_values: Tensor
    bans: Tensor
    random_rows: Tensor
    knobs: Tensor
    forced: Tensor
    top_rows: Tensor
    masked_rows: Tensor
    masks: Tensor
    penalty_rows: Tensor
    penalty_slots: Tensor
    penalty_factors: Tensor
    penalty_stale: Tensor
    penalty_prompt: Tensor
    penalty_output: Tensor


class Drawn(NamedTuple):
    """`token_ids` `[R]`, -1 where logits were not finite; `stats` `[R, 4]` fp32: log-prob of the
    token, entropy, confidence, margin; `top_ids`, `top_logprobs` `[A, k]` for rows that asked."""

    token_ids: Tensor
    stats: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Sampler:
    """Draws tokens. `end_marker_id` is the first token of the thinking end marker, if there is one."""

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: tuple[int, ...],
        end_marker_id: int | None,
        device: torch.device,
    ) -> None:
        self.end_marker_id = end_marker_id
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._penalties = Penalties(vocab_size, max_num_seqs, device)

    def pack(self, samples: list[SampleRow]) -> list[IntArray]:
        """Host arrays in the order of `SamplerInputs`."""
        edits = [(i, t) for i, s in enumerate(samples) for t in s.params.logit_bias]
        values = [b for s in samples for b in s.params.logit_bias.values()]
        bans = [
            (i, t)
            for i, s in enumerate(samples)
            if s.ban_eos
            for t in sorted({*self._eos_token_ids, *s.params.stop_token_ids})
        ]
        drawn = [(i, s) for i, s in enumerate(samples) if s.params.temperature > 0 and s.forced_token is None]
        knobs = [_knobs(s, self._vocab_size) for _, s in drawn]
        forced = [(i, s.forced_token) for i, s in enumerate(samples) if s.forced_token is not None]
        return [
            np.array(edits, dtype=np.int64).reshape(-1, 2).T,
            np.array(values, dtype=np.float64).view(np.int64),
            np.array(bans, dtype=np.int64).reshape(-1, 2).T,
            np.array([i for i, _ in drawn], dtype=np.int64),
            np.ascontiguousarray(np.array(knobs, dtype=np.float64).reshape(-1, 5).T).view(np.int64),
            np.array(forced, dtype=np.int64).reshape(-1, 2).T,
            np.array([i for i, s in enumerate(samples) if s.params.logprobs], dtype=np.int64),
            np.array([i for i, s in enumerate(samples) if s.allowed is not None], dtype=np.int64),
            self._masks(samples),
            *penalties.pack(samples),
        ]

    def _masks(self, samples: list[SampleRow]) -> IntArray:
        masks = [np.frombuffer(s.allowed, dtype=np.int64) for s in samples if s.allowed is not None]
        return np.stack(masks) if masks else np.zeros((0, -(-self._vocab_size // 64)), dtype=np.int64)

    def sample(self, logits: Tensor, samples: list[SampleRow], inputs: SamplerInputs) -> Drawn:
        """Draw one token a row from `logits` `[R, V]` (any float dtype, left as they are)."""
        raw = logits.float()
        best, least = raw.amax(dim=-1), raw.amin(dim=-1)
        finite = (best < torch.inf) & (least > -torch.inf)  # NaN is neither
        logprobs = raw.log_softmax(dim=-1)
        token_ids = torch.where(finite, self._draw(raw, samples, inputs), -1)
        stats = self._statistics(raw, best, logprobs, token_ids.clamp(min=0))
        num_top = min(max((s.params.logprobs or 0 for s in samples), default=0), self._vocab_size)
        if not num_top:
            return Drawn(token_ids, stats, token_ids[:0, None], logprobs[:0, :0])
        top = logprobs[inputs.top_rows].topk(num_top, dim=-1)
        return Drawn(token_ids, stats, top.indices, top.values)

    def _statistics(self, raw: Tensor, best: Tensor, logprobs: Tensor, token_ids: Tensor) -> Tensor:
        entropy = -row_sums(logprobs.exp() * logprobs)
        confidence = logprobs.topk(min(CONFIDENCE_TOKENS, self._vocab_size), dim=-1).values.mean(dim=-1).neg_()
        end = self.end_marker_id
        margin = torch.full_like(best, torch.nan) if end is None else best - raw[:, end]
        return torch.stack([logprobs.gather(1, token_ids[:, None])[:, 0], entropy, confidence, margin], dim=1)

    def _draw(self, raw: Tensor, samples: list[SampleRow], inputs: SamplerInputs) -> Tensor:
        logits = raw
        penalty_inputs = list(inputs[-6:])
        if any(part.numel() for part in (inputs.penalty_rows, inputs.edits, inputs.bans, inputs.masked_rows)):
            logits = raw.clone()
        if inputs.penalty_rows.numel():
            self._penalties.apply(logits, penalty_inputs)
        if inputs.edits.numel():
            bias = inputs.edit_values.view(torch.float64).float()
            logits.index_put_((inputs.edits[0], inputs.edits[1]), bias, accumulate=True)
        if inputs.bans.numel():
            logits[inputs.bans[0], inputs.bans[1]] = -torch.inf
        if inputs.masked_rows.numel():
            rows = inputs.masked_rows
            logits[rows] = logits[rows].masked_fill(~_bits(inputs.masks, self._vocab_size), -torch.inf)
        token_ids = _choose(logits, samples, inputs)
        if inputs.penalty_rows.numel():
            self._penalties.count(penalty_inputs, token_ids)
        return token_ids


def _choose(logits: Tensor, samples: list[SampleRow], inputs: SamplerInputs) -> Tensor:
    """A token id `[R]` for each row of `logits` `[R, V]`: drawn, forced or the most likely one."""
    num_random = len(inputs.random_rows)
    params = [s.params for s in samples if s.params.temperature > 0 and s.forced_token is None] if num_random else []
    if num_random == len(logits):
        return filters.draw(logits, inputs.knobs.view(torch.float64), params)
    token_ids = logits.argmax(dim=-1)
    if num_random:
        drawn = filters.draw(logits[inputs.random_rows], inputs.knobs.view(torch.float64), params)
        token_ids[inputs.random_rows] = drawn
    if inputs.forced.numel():
        token_ids[inputs.forced[0]] = inputs.forced[1]
    return token_ids


def _bits(masks: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row of words, as booleans `[M, count]`."""
    bits = masks[:, :, None] >> torch.arange(64, device=masks.device) & 1
    return bits.flatten(1)[:, :count].bool()


def _knobs(sample: SampleRow, vocab_size: int) -> tuple[float, float, float, float, float]:
    params = sample.params
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    u = rng.uniform(sample.seed, sample.branch, sample.position)
    return params.temperature, u, params.top_p, params.min_p, top_k
