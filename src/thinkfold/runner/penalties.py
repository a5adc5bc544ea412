"""Repetition, presence and frequency penalties over per-slot token counts on the device.

It does not know when counts become stale: whoever plans a row sends its history then.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.scheduler.output import SampleRow
from thinkfold.types import SamplingParams

IntArray = NDArray[np.int64]


def penalised(params: SamplingParams) -> bool:
    """Whether any of the three penalties changes logits."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def pack(samples: list[SampleRow]) -> list[IntArray]:
    """Host arrays of the penalised rows: rows, slots, factors, stale slots, prompt and output pairs.

    `factors` `[3, P]` are repetition, presence, frequency as float64 bits; pairs are `[2, n]`
    of (slot, token id).
    """
    active = [(i, s) for i, s in enumerate(samples) if penalised(s.params)]
    if not active:
        return [np.zeros(shape, np.int64) for shape in ((0,), (0,), (3, 0), (0,), (2, 0), (2, 0))]
    factors = [(s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty) for _, s in active]
    rebuilt = [(s.slot, s.history) for _, s in active if s.history is not None]
    return [
        np.array([i for i, _ in active], dtype=np.int64),
        np.array([s.slot for _, s in active], dtype=np.int64),
        np.ascontiguousarray(np.array(factors, dtype=np.float64).reshape(-1, 3).T).view(np.int64),
        np.array([slot for slot, _ in rebuilt], dtype=np.int64),
        _pairs([(slot, history[0]) for slot, history in rebuilt]),
        _pairs([(slot, history[1]) for slot, history in rebuilt]),
    ]


def _pairs(histories: list[tuple[int, list[int]]]) -> IntArray:
    slots = [np.full(len(ids), slot, dtype=np.int64) for slot, ids in histories]
    ids = [np.array(ids, dtype=np.int64) for _, ids in histories]
    empty = np.zeros(0, np.int64)
    return np.stack([np.concatenate([empty, *slots]), np.concatenate([empty, *ids])])


class Penalties:
    """Counts of every slot: which ids its prompt holds, how often its output does.

    Memory (5 bytes x max_num_seqs x vocab_size) is taken when the first row asks for a penalty.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._counts: tuple[Tensor, Tensor] | None = None

    def apply(self, logits: Tensor, packed: list[Tensor]) -> None:
        """Change the penalised rows of `logits` `[R, V]` fp32 in place; `packed` as `pack` lays it out."""
        rows, slots, bits, stale, prompt, output = packed
        in_prompt, counts = self._tables()
        if stale.numel():
            in_prompt[stale] = False
            counts[stale] = 0
            in_prompt[prompt[0], prompt[1]] = True
            counts.index_put_((output[0], output[1]), counts.new_ones(()), accumulate=True)
        repetition, presence, frequency = bits.view(torch.float64).float()[..., None]
        chosen = logits[rows]
        count = counts[slots]
        seen = in_prompt[slots] | (count > 0)
        repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(seen, repeated, chosen)
        logits[rows] = chosen - frequency * count - presence * (count > 0)

    def count(self, packed: list[Tensor], token_ids: Tensor) -> None:
        """Add the drawn `token_ids` `[R]` of the penalised rows to their slots' output counts."""
        rows, slots = packed[:2]
        _, counts = self._tables()
        counts.index_put_((slots, token_ids[rows]), counts.new_ones(()), accumulate=True)

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._counts is None:
            self._counts = (
                torch.zeros(self._shape, dtype=torch.bool, device=self._device),
                torch.zeros(self._shape, dtype=torch.int32, device=self._device),
            )
        return self._counts
