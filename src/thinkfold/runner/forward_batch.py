"""One step's tensors, packed from a StepPlan on the host and moved to the device in one copy.

It knows no model and draws no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinkfold.runner.transfer import IntArray, concat, to_device
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
    lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    padding = -int(offsets[-1]) % token_tile
    sample_rows = [int(offsets[i + 1]) - 1 for i, row in enumerate(rows) for _ in row.samples]
    sample_rows += [0] * (-len(sample_rows) % token_tile)
    late = [i for i, row in enumerate(rows) if row.from_slot]
    arrays: list[IntArray] = [
        _pad(concat([_token_ids(row) for row in rows]), padding, 0)[None],
        _pad(concat([np.arange(row.position, row.position + row.num_tokens) for row in rows]), padding, 0)[None],
        np.array(sample_rows, dtype=np.int64),
        offsets[late],
        np.array([rows[i].slot for i in late], dtype=np.int64),
        offsets,
        np.array([row.kv_start for row in rows], dtype=np.int64) + lengths,
        _page_table(rows, page_size),
        _pad(concat([_slots(row, page_size) for row in rows]), padding, -1),
        np.array(summary_rows, dtype=np.int64),
        np.array(sinks[0], dtype=np.int64),
        np.array(sinks[1], dtype=np.int64),
        np.array([sample.slot for sample in samples_of(plan)], dtype=np.int64),
    ]
    tensors = to_device(arrays + extra, device)
    inputs = StepInputs(*tensors[: len(arrays)])
    inputs = inputs._replace(
        cu_seqlens_q=inputs.cu_seqlens_q.int(), kv_lens=inputs.kv_lens.int(), page_table=inputs.page_table.int()
    )
    return inputs, tensors[len(arrays) :]


def samples_of(plan: StepPlan) -> list[SampleRow]:
    """All tokens to draw in a step, in the order of its result."""
    return [sample for row in plan.rows for sample in row.samples]


def _pad(array: IntArray, padding: int, value: int) -> IntArray:
    return np.pad(array, (0, padding), constant_values=value) if padding else array


def _token_ids(row: BatchRow) -> IntArray:
    return np.zeros(1, np.int64) if row.from_slot else np.array(row.token_ids, dtype=np.int64)


def _slots(row: BatchRow, page_size: int) -> IntArray:
    entries = np.arange(row.kv_start, row.kv_start + row.num_tokens)
    if entries.size and entries[-1] // page_size >= len(row.pages):
        raise ValueError(f"slot {row.slot}: {len(row.pages)} pages cannot hold {entries[-1] + 1} entries")
    pages = np.array(row.pages, dtype=np.int64)
    return pages[entries // page_size] * page_size + entries % page_size


def _page_table(rows: list[BatchRow], page_size: int) -> IntArray:
    used = [(row.kv_start + row.num_tokens + page_size - 1) // page_size for row in rows]
    table = np.zeros((len(rows), max(used, default=0)), dtype=np.int64)
    for line, row, num in zip(table, rows, used, strict=True):
        line[:num] = row.pages[:num]
    return table
