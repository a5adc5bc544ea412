"""From logits to tokens: statistics on raw logits, then the user's changes, then the draw.

It works on all rows at once and never waits for the device. A row's token is a function of its
own logits, parameters and counter: neighbours change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.runner import filters, observed, penalties, rng
from thinkfold.runner.observed import Seen
from thinkfold.runner.penalties import Penalties
from thinkfold.scheduler.output import SampleRow
from thinkfold.types import SamplingParams

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


class FixedInputs(NamedTuple):
    """Sampling parameters of S rows in fixed shapes: `forced` `[S]` ids or -1, `ban` `[S]` 1 where no end token may
    come, `knobs` `[5, S]` fp64 as in `SamplerInputs`, temperature 0 for greedy rows."""

    forced: Tensor
    ban: Tensor
    knobs: Tensor


class Draws(Enum):
    """How much work the rows of a step with fixed shapes ask for."""

    GREEDY = auto()
    FREE = auto()  # temperature alone
    FILTERED = auto()  # with top-k, top-p or min-p


class Drawn(NamedTuple):
    """`token_ids` `[R]`, -1 where logits were not finite; `stats` `[R, 4]` fp32: log-prob of the
    token, entropy, confidence, margin; `top_ids`, `top_logprobs` `[A, k]` for rows that asked."""

    token_ids: Tensor
    stats: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class _Bodies(NamedTuple):
    """What reads whole rows of logits, in PyTorch or in Triton."""

    observe: Callable[[Tensor, int], Seen]
    draw: Callable[[Tensor, Tensor, list[SamplingParams]], Tensor]


class Sampler:
    """Draws tokens. `end_marker_id` is the first token of the thinking end marker, if there is one.

    `backend` is reference (plain PyTorch) or triton, as for attention.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: tuple[int, ...],
        end_marker_id: int | None,
        device: torch.device,
        backend: str = "reference",
    ) -> None:
        self.end_marker_id = end_marker_id
        self._bodies = _bodies(backend)
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._num_confident = min(CONFIDENCE_TOKENS, vocab_size)
        self._penalties = Penalties(vocab_size, max_num_seqs, device)
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        # Rows that between them ask for every filter, so that no work is left out.
        wide = max(1, vocab_size - 1)
        self._all_filters = [SamplingParams(top_k=wide), SamplingParams(top_p=0.5, min_p=0.5)]

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
        knobs = [self.knobs(s) for _, s in drawn]
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

    def knobs(self, sample: SampleRow) -> tuple[float, float, float, float, float]:
        """Temperature, u, top_p, min_p and top_k of a row that is drawn."""
        params = sample.params
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        u = rng.uniform(sample.seed, sample.branch, sample.position)
        return params.temperature, u, params.top_p, params.min_p, top_k

    def sample(self, logits: Tensor, samples: list[SampleRow], inputs: SamplerInputs) -> Drawn:
        """Draw one token a row from `logits` `[R, V]` (any float dtype, left as they are)."""
        raw = logits.float()
        seen = self._bodies.observe(raw, self._num_confident)
        token_ids = torch.where(seen.finite, self._draw(raw, samples, inputs), -1)
        stats = self._statistics(raw, seen, token_ids)
        num_top = min(max((s.params.logprobs or 0 for s in samples), default=0), self._vocab_size)
        if not num_top:
            return Drawn(token_ids, stats, token_ids[:0, None], stats[:0, :0])
        top = raw[inputs.top_rows].topk(num_top, dim=-1)
        return Drawn(token_ids, stats, top.indices, top.values - seen.lse[inputs.top_rows, None])

    def sample_fixed(self, raw: Tensor, inputs: FixedInputs, draws: Draws) -> tuple[Tensor, Tensor]:
        """Token ids and stats as `sample` gives them, of `raw` `[S, V]` (any float dtype), left as it was.

        What is launched depends on shapes and `draws` alone, so it can be captured. It knows no
        penalties, no logit bias, no masks, no top log-probs, and of end tokens the model's own.
        """
        seen = self._bodies.observe(raw, self._num_confident)
        ends = raw[:, self._eos]
        raw[:, self._eos] = ends.masked_fill((inputs.ban > 0)[:, None], -torch.inf)
        token_ids = raw.argmax(dim=-1)
        if draws is not Draws.GREEDY:
            temperature = inputs.knobs[0]
            knobs = torch.cat([torch.where(temperature > 0, temperature, 1.0)[None], inputs.knobs[1:]])
            drawn = self._bodies.draw(raw, knobs, self._all_filters if draws is Draws.FILTERED else [])
            token_ids = torch.where(temperature > 0, drawn, token_ids)
        token_ids = torch.where(inputs.forced >= 0, inputs.forced, token_ids)
        token_ids = torch.where(seen.finite, token_ids, -1)
        raw[:, self._eos] = ends
        return token_ids, self._statistics(raw, seen, token_ids)

    def has_fixed_shapes(self, sample: SampleRow) -> bool:
        """Whether `sample_fixed` can draw this row."""
        params = sample.params
        if params.logprobs or params.logit_bias or penalties.penalised(params) or sample.allowed is not None:
            return False
        return not (sample.ban_eos and params.stop_token_ids)

    def _statistics(self, raw: Tensor, seen: Seen, token_ids: Tensor) -> Tensor:
        logprob = raw.gather(1, token_ids.clamp(min=0)[:, None])[:, 0].float() - seen.lse
        end = self.end_marker_id
        margin = torch.full_like(seen.best, torch.nan) if end is None else seen.best - raw[:, end].float()
        return torch.stack([logprob, seen.entropy, seen.confidence, margin], dim=1)

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
        token_ids = self._choose(logits, samples, inputs)
        if inputs.penalty_rows.numel():
            self._penalties.count(penalty_inputs, token_ids)
        return token_ids

    def _choose(self, logits: Tensor, samples: list[SampleRow], inputs: SamplerInputs) -> Tensor:
        """A token id `[R]` for each row of `logits` `[R, V]`: drawn, forced or the most likely one."""
        draw, knobs, num_random = self._bodies.draw, inputs.knobs.view(torch.float64), len(inputs.random_rows)
        params = [s.params for s in samples if s.params.temperature > 0 and s.forced_token is None]
        if num_random == len(logits):
            return draw(logits, knobs, params)
        token_ids = logits.argmax(dim=-1)
        if num_random:
            token_ids[inputs.random_rows] = draw(logits[inputs.random_rows], knobs, params)
        if inputs.forced.numel():
            token_ids[inputs.forced[0]] = inputs.forced[1]
        return token_ids


def draws_of(samples: Iterable[SampleRow]) -> Draws:
    """The least work that draws all of them."""
    found = Draws.GREEDY
    for sample in samples:
        params = sample.params
        if params.temperature > 0 and sample.forced_token is None:
            if params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0:
                return Draws.FILTERED
            found = Draws.FREE
    return found


def _bits(masks: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row of words, as booleans `[M, count]`."""
    bits = masks[:, :, None] >> torch.arange(64, device=masks.device) & 1
    return bits.flatten(1)[:, :count].bool()


def _bodies(backend: str) -> _Bodies:
    if backend != "triton":
        return _Bodies(observed.observe, filters.draw)
    from thinkfold.runner import triton_draw, triton_observe  # Triton is not everywhere, and slow to import

    return _Bodies(triton_observe.observe, triton_draw.draw)
