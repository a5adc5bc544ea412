"""How wrong attention gets if this model's keys and values are kept as fp8: measured at start, on real rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8, dequantise, quantise
from thinkfold.config import EngineConfig
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.runner import forward_batch
from thinkfold.runner.attention_facts import AttentionFacts, attention_facts
from thinkfold.runner.forward import forward
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import DeviceMemory
from thinkfold.scheduler.output import BatchRow, StepPlan

logger = logging.getLogger(__name__)

TOLERANCE = 0.1  # of the attention output's length, in the worst layer; see docs/lab-notes.md
_MOST = 256  # tokens of a text
_TEXTS = (
    "A train leaves at 9:40 and covers 270 km at 90 km/h. A second one leaves the same station 45 minutes later on a "
    "parallel track at 120 km/h. When and where does it overtake the first, and how long have both been on their way? "
    "Let t be the hours since 9:40. The first has gone 90t, the second 120(t - 0.75), so 30t = 90 and t = 3.",
    "def merge(left, right):\n    out = []\n    while left and right:\n        side = left if left[0] <= right[0] else "
    "right\n        out.append(side.pop(0))\n    return out + left + right\n\nassert merge([1, 4], [2]) == [1, 2, 4]",
    "The harbour lay quiet under a thin fog. Two men carried a crate along the quay, set it down beside the crane and "
    "waited for the tide. Nobody had told them what was in it, and neither had asked; the older one smoked, the "
    "younger one counted the lamps that were still burning on the other shore.",
)


def stored_dtype(
    config: EngineConfig, loaded: LoadedModel, budgets: FoldBudgets, token_tile: int
) -> tuple[torch.dtype, float | None]:
    """What keys and values are stored as, and the error of fp8 where it was measured (`auto`, `fp8_e4m3`).

    `auto` is fp8 unless its error is beyond TOLERANCE in some layer; fp8_e4m3 is taken at its word, with a warning.
    """
    if config.kv_cache_dtype == "model":
        return loaded.dtype, None
    errors = fp8_errors(config, loaded, budgets, token_tile)
    worst = int(errors.argmax())
    error, good = float(errors[worst]), float(errors[worst]) <= TOLERANCE
    says = "fp8 KV moves the attention output of layer %d by %.1f %%, the most of all layers (allowed: %.0f %%)"
    facts = (worst, 100 * error, 100 * TOLERANCE)
    if config.kv_cache_dtype == "auto":
        logger.info(says + "; KV is stored as %s", *facts, FP8 if good else loaded.dtype)
        return FP8 if good else loaded.dtype, error
    if not good:
        logger.warning(says + "; kv_cache_dtype auto would keep the model's", *facts)
    return FP8, error


@torch.no_grad()
def fp8_errors(config: EngineConfig, loaded: LoadedModel, budgets: FoldBudgets, token_tile: int) -> Tensor:
    """Relative error of the attention output `[L]`, the largest over the texts; 1 where fp8 cannot hold a row.

    Of several ranks every one measures its heads, and all come to the same.
    """
    size, texts = config.page_size, list(_token_ids(loaded))
    pages = -(-max(map(len, texts)) // size)
    one_row = replace(config, max_num_seqs=1)
    memory = DeviceMemory(one_row, loaded, budgets, pages * size, loaded.dtype, pages)
    facts, errors = attention_facts(loaded), []
    for ids in texts:
        row = BatchRow(0, ids, from_slot=False, position=0, kv_start=0, pages=list(range(pages)), keep_queries=True)
        kept = memory.queries.place([row])
        inputs, _ = forward_batch.build(StepPlan(0, [row]), size, token_tile, loaded.device, [], [-1], kept)
        forward(loaded.model, memory, inputs)
        positions = memory.queries.positions(0, None)
        queries, _ = memory.queries.read(0, positions)
        keys, values = memory.storage.read_span(torch.arange(-(-len(ids) // size), device=loaded.device))
        raw = keys[:, :, : len(ids)], values[:, :, : len(ids)]
        errors.append(output_squares(queries.to(keys.dtype), *raw, positions, facts))
        memory.queries.forget(0)
    squares = torch.stack(errors)
    loaded.shard.sum_(squares)
    return (squares[..., 0] / squares[..., 1]).sqrt().nan_to_num(1.0).clamp(max=1.0).amax(0)


def output_squares(
    queries: Tensor, keys: Tensor, values: Tensor, positions: list[int], facts: AttentionFacts
) -> Tensor:
    """Squared length `[L, 2]` of the error and of what queries `[L, n, Hq, D]` at `positions` read, if keys and values
    `[L, Hkv, T, D]` are kept as fp8."""
    layers, count, _, dim = queries.shape
    rows = queries.view(layers, count, keys.shape[1], -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    at = torch.tensor(positions, device=keys.device).repeat(rows.shape[2] // count).unsqueeze(-1)
    tokens = torch.arange(keys.shape[2], device=keys.device)
    hidden = (tokens > at).expand(layers, 1, -1, -1)
    if facts.window:
        hidden = hidden | (facts.windowed.view(-1, 1, 1, 1) & (tokens <= at - facts.window))

    def read(keys: Tensor, values: Tensor) -> Tensor:
        logits = rows @ keys.transpose(-1, -2) * facts.scale
        return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values

    exact, rounded = read(keys, values), read(_rounded(keys), _rounded(values))
    return torch.stack([(rounded - exact).flatten(1).square().sum(1), exact.flatten(1).square().sum(1)], 1)


def _rounded(rows: Tensor) -> Tensor:
    return dequantise(*quantise(rows), rows.dtype)


def _token_ids(loaded: LoadedModel) -> Iterator[list[int]]:
    """Tokens of the texts; without a tokenizer the vocabulary stands in."""
    for number, text in enumerate(_TEXTS):
        ids = [] if loaded.tokenizer is None else loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        known = [int(i) for i in ids if i < loaded.vocab_size][:_MOST]
        yield known or [(number + 7 * i) % loaded.vocab_size for i in range(_MOST // 4)]
