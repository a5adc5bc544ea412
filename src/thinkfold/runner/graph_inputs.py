"""The inputs of a captured step: fixed shapes, one buffer, one copy; and how a plan is packed into them.

Rows and tokens behind the plan's own are padding: they attend to nothing and write nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.runner.forward_batch import slots_of
from thinkfold.runner.sampler import FixedInputs, Sampler
from thinkfold.scheduler.output import SampleRow, StepPlan

MAX_TOKENS = 512  # steps of more are bound by arithmetic, not by launches
LEAST = 2  # a compiler takes a size of 1 for a case of its own
MIXED = (16, 32, 64, 128, 256, 512)

Array = TypeVar("Array", Tensor, NDArray[np.int64])


class Bucket(NamedTuple):
    """Room of one graph: tokens, and rows, each of which may be sampled."""

    tokens: int
    rows: int


class Buckets:
    """All shapes that are captured: decode steps have a token a row, mixed ones any."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        most = min(MAX_TOKENS, max_num_batched_tokens)
        sizes = [2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, MAX_TOKENS + 1, 64)]
        last = max(LEAST, min(most, max_num_seqs))
        self.decode = [Bucket(n, n) for n in sizes if n < last] + [Bucket(last, last)]
        tokens = [n for n in MIXED if n < most] + [max(LEAST, most)]
        # One token a row at the most is a decode step; the same shape is captured once.
        self.mixed = [b for n in tokens if (b := Bucket(n, min(n, last))) not in self.decode]

    @property
    def all(self) -> list[Bucket]:
        """Largest first: later graphs then find room in the memory of earlier ones."""
        return sorted({*self.decode, *self.mixed}, reverse=True)

    def find(self, tokens: int, rows: int, samples: int) -> Bucket | None:
        """The smallest bucket that holds a step; None if no one does."""
        rows = max(rows, samples)
        if tokens == rows:
            at = bisect_left(self.decode, (rows, rows))
            return self.decode[at] if at < len(self.decode) else None
        fitting = (b for b in (*self.mixed, *self.decode) if b.tokens >= tokens and b.rows >= rows)
        return min(fitting, default=None)


class GraphInputs(NamedTuple, Generic[Array]):
    """Views of one int64 buffer for a bucket of T tokens and R rows.

    What is sampled stands first, at places that depend on R alone. `sample_rows` token rows,
    `sample_slots`, `forced`, `ban` `[R]`, `knobs` `[5, R]` fp64 bits; `late` `[T]` is the slot
    whose last drawn token is the id, or -1; `sink_rows`, `sink_lines` `[T]`; `cu` `[R + 1]`;
    `row_slots` `[R]` lines of the page tables. The rest is as in `StepInputs`.
    """

    sample_rows: Array
    sample_slots: Array
    forced: Array
    ban: Array
    knobs: Array
    ids: Array
    positions: Array
    late: Array
    slots: Array
    sink_rows: Array
    sink_lines: Array
    cu: Array
    kv_lens: Array
    row_slots: Array
    summary_rows: Array


def num_words(bucket: Bucket) -> int:
    """int64 words of a bucket's buffer."""
    return 9 * bucket.rows + 6 * bucket.tokens + 4 * bucket.rows + 1


def views(buffer: Array, bucket: Bucket) -> GraphInputs[Array]:
    """A bucket's inputs in `buffer`, a tensor or an array of at least `num_words`."""
    tokens, rows = bucket
    sizes = [rows] * 4 + [5 * rows] + [tokens] * 6 + [rows + 1, rows, rows, rows]
    ends = [0, *accumulate(sizes)]
    parts = [buffer[a:b] for a, b in pairwise(ends)]
    parts[4] = parts[4].reshape(5, rows)
    return GraphInputs(*parts)


def fixed(inputs: GraphInputs[Tensor]) -> FixedInputs:
    """What the sampler reads."""
    return FixedInputs(inputs.forced, inputs.ban, inputs.knobs.view(torch.float64))


class Packer:
    """Fills host buffers. `trash_slot` and `trash_line` are where padding's results go."""

    def __init__(self, page_size: int, vocab_size: int, trash_slot: int, trash_line: int) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._trash = (trash_slot, trash_line)
        self._blank: dict[Bucket, NDArray[np.int64]] = {}

    def blank(self, bucket: Bucket) -> NDArray[np.int64]:
        """A buffer of nothing but padding. Do not change it."""
        if bucket not in self._blank:
            buffer = np.zeros(num_words(bucket), dtype=np.int64)
            host, (slot, line) = views(buffer, bucket), self._trash
            for part in (host.forced, host.late, host.slots, host.sink_rows, host.summary_rows):
                part[:] = -1
            host.sample_slots[:] = host.row_slots[:] = slot
            host.sink_lines[:] = line
            knobs = np.zeros((5, bucket.rows))
            knobs[2], knobs[4] = 1.0, self._vocab_size
            host.knobs[:] = knobs.view(np.int64)
            self._blank[bucket] = buffer
        return self._blank[bucket]

    def pack(
        self,
        buffer: NDArray[np.int64],
        bucket: Bucket,
        plan: StepPlan,
        summary_rows: Sequence[int],
        sinks: tuple[Sequence[int], Sequence[int]],
    ) -> GraphInputs[NDArray[np.int64]]:
        """Write a plan's rows over padding; where they went.

        Raises ValueError for a row whose pages are too few for its entries.
        """
        np.copyto(buffer, self.blank(bucket))
        host, rows = views(buffer, bucket), plan.rows
        count = len(rows)
        lengths = [row.num_tokens for row in rows]
        ends = list(accumulate(lengths))
        total = ends[-1]
        host.cu[1 : count + 1] = ends
        host.cu[count + 1 :] = total
        host.kv_lens[:count] = [row.kv_start + n for row, n in zip(rows, lengths, strict=True)]
        host.row_slots[:count] = [row.slot for row in rows]
        host.summary_rows[:count] = summary_rows
        host.ids[:total] = [i for row in rows for i in ((0,) if row.from_slot else row.token_ids)]
        host.positions[:total] = [
            p for row, n in zip(rows, lengths, strict=True) for p in range(row.position, row.position + n)
        ]
        host.slots[:total] = [slot for row in rows for slot in slots_of(row, self._page_size)]
        late = [(end - 1, row.slot) for end, row in zip(ends, rows, strict=True) if row.from_slot]
        host.late[[token for token, _ in late]] = [slot for _, slot in late]
        host.sink_rows[: len(sinks[0])], host.sink_lines[: len(sinks[1])] = sinks
        drawn = [end - 1 for end, row in zip(ends, rows, strict=True) for _ in row.samples]
        host.sample_rows[: len(drawn)] = drawn
        return host


def pack_samples(host: GraphInputs[NDArray[np.int64]], samples: Sequence[SampleRow], sampler: Sampler) -> None:
    """Write how each sample is drawn; slots too."""
    count = len(samples)
    host.sample_slots[:count] = [s.slot for s in samples]
    host.forced[:count] = [-1 if s.forced_token is None else s.forced_token for s in samples]
    host.ban[:count] = [s.ban_eos for s in samples]
    drawn = [
        (i, sampler.knobs(s)) for i, s in enumerate(samples) if s.params.temperature > 0 and s.forced_token is None
    ]
    if drawn:
        host.knobs.view(np.float64)[:, [i for i, _ in drawn]] = np.array([knobs for _, knobs in drawn]).T
