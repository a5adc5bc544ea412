"""One step's tensors, packed from a StepPlan on the host and moved to the device in one copy.

It knows no model and draws no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from thinkfold.runner.transfer import IntArray, to_device
from thinkfold.scheduler.output import BatchRow, SampleRow, StepPlan


class ForwardBatch(NamedTuple):
    """What the attention of every layer needs in one step: tensors only (a pytree).

    `kv` is the one KV tensor; B rows, T tokens with padding; the other names, shapes and dtypes
    are those of `thinkfold.attention.ops.paged_attention`.
    """

    kv: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    summary_rows: Tensor
    summary_table: Tensor
    summary_lens: Tensor
    bias: Tensor
    kv_scales: Tensor
    query_sink_rows: Tensor
    query_sink: Tensor
    lse_sink: Tensor


class StepInputs(NamedTuple):
    """A plan on the device: inputs of the forward, and where tokens are drawn.

    `input_ids`, `position_ids` `[1, T]`; `sample_rows` `[S]` token rows whose logits are wanted,
    padded by repeating row 0 beyond the plan's samples; `late_rows`, `late_slots` `[F]` token
    rows whose id is still in `last_token[slot]`; `sink_rows`, `sink_lines` `[K]` token rows whose
    query is kept and where; `sample_slots` `[R]` slots of the plan's samples.
    """

    input_ids: Tensor
    position_ids: Tensor
    sample_rows: Tensor
    late_rows: Tensor
    late_slots: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    summary_rows: Tensor
    sink_rows: Tensor
    sink_lines: Tensor
    sample_slots: Tensor


def build(
    plan: StepPlan,
    page_size: int,
    token_tile: int,
    device: torch.device,
    extra: list[IntArray],
    summary_rows: Sequence[int],
    sinks: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> tuple[StepInputs, list[Tensor]]:
    """Pack `plan` and `extra` into tensors on `device` with one copy.

    T and the number of sampled rows are padded to multiples of `token_tile`. `summary_rows` is
    the line of the summary tables of each row, -1 for none; `sinks` are the token rows whose
    queries are kept, and where. Raises ValueError for a row whose pages are too few for its entries.
    """
    rows = plan.rows
    lengths = [row.num_tokens for row in rows]
    offsets = [0, *accumulate(lengths)]
    padding = -offsets[-1] % token_tile
    sample_rows = [end - 1 for end, row in zip(offsets[1:], rows, strict=True) for _ in row.samples]
    sample_rows += [0] * (-len(sample_rows) % token_tile)
    late = [i for i, row in enumerate(rows) if row.from_slot]
    token_ids = [token for row in rows for token in ((0,) if row.from_slot else row.token_ids)]
    positions = [p for row, n in zip(rows, lengths, strict=True) for p in range(row.position, row.position + n)]
    slots = [slot for row in rows for slot in slots_of(row, page_size)]
    arrays: list[ArrayLike] = [
        [token_ids + [0] * padding],
        [positions + [0] * padding],
        sample_rows,
        [offsets[i] for i in late],
        [rows[i].slot for i in late],
        offsets,
        [row.kv_start + n for row, n in zip(rows, lengths, strict=True)],
        _page_table(rows, page_size),
        slots + [-1] * padding,
        summary_rows,
        *sinks,
        [sample.slot for row in rows for sample in row.samples],
    ]
    tensors = to_device([*arrays, *extra], device)
    inputs = StepInputs(*tensors[: len(arrays)])
    inputs = inputs._replace(
        cu_seqlens_q=inputs.cu_seqlens_q.int(), kv_lens=inputs.kv_lens.int(), page_table=inputs.page_table.int()
    )
    return inputs, tensors[len(arrays) :]


def samples_of(plan: StepPlan) -> list[SampleRow]:
    """All tokens to draw in a step, in the order of its result."""
    return [sample for row in plan.rows for sample in row.samples]


def slots_of(row: BatchRow, page_size: int) -> list[int]:
    """Where the entries of a row are written. Most rows have one, for which numpy is slow.

    Raises ValueError for a row whose pages are too few for its entries.
    """
    end = row.kv_start + row.num_tokens
    if end > len(row.pages) * page_size:
        raise ValueError(f"slot {row.slot}: {len(row.pages)} pages cannot hold {end} entries")
    return [row.pages[entry // page_size] * page_size + entry % page_size for entry in range(row.kv_start, end)]


def _page_table(rows: list[BatchRow], page_size: int) -> IntArray:
    used = [(row.kv_start + row.num_tokens + page_size - 1) // page_size for row in rows]
    width = max(used, default=0)
    lines = [row.pages[:num] + [0] * (width - num) for row, num in zip(rows, used, strict=True)]
    return np.array(lines, dtype=np.int64).reshape(len(rows), width)
