"""Decode steps and small mixed steps as CUDA graphs: captured once at start, then replayed.

A step of the model is hundreds of launches, which cost the host more than they cost the device; a
graph is one. Shapes are buckets, lengths and tables are read on the device, and no tensor that a
graph knows is ever replaced, so folds, swaps, forks and aborts force no new capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from thinkfold.config import EngineConfig
from thinkfold.errors import UnsupportedError
from thinkfold.runner.forward import forward
from thinkfold.runner.forward_batch import StepInputs
from thinkfold.runner.graph_inputs import Bucket, Buckets, Packer, fixed, num_words, pack_samples, views
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import DeviceMemory
from thinkfold.runner.page_tables import PageTables
from thinkfold.runner.sampler import NUM_STATS, Draws, Sampler, draws_of
from thinkfold.runner.transfer import pinned
from thinkfold.scheduler.output import SampleRow, StepPlan

logger = logging.getLogger(__name__)

OUT = 1 + NUM_STATS  # numbers that a drawn token sends home

Replay = Callable[[], None]


class Capture(Protocol):
    """Turns launches into something that repeats them; the body has been run once when it returns."""

    def __call__(self, body: Callable[[], None]) -> Replay: ...
    def used_bytes(self) -> int: ...
    def reset(self) -> None: ...


class CudaCapture:
    """Graphs of one device that share their working memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def __call__(self, body: Callable[[], None]) -> Replay:
        """Run `body`, so that kernels are made and libraries set up, then capture it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            body()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        current.wait_stream(self._stream)
        return graph.replay

    def used_bytes(self) -> int:
        """Bytes of the device that are not free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reset(self) -> None:
        """Forget the memory of graphs that are gone."""
        self._pool = None
        torch.cuda.empty_cache()


class StepGraphs:
    """The captured steps of one runner.

    A graph of the forward exists for each bucket twice: without summaries and kept queries, and
    with both; a graph of the draws for each number of rows and each kind of `Draws`. `captures`
    and `replays` are counted. `model` is `loaded.model`, or what it was compiled to. `last_token`
    `[max_num_seqs + 1]` is the runner's, with a place for padding at its end. Call `memory.reserve`
    before, and `capture` when its pages have their number.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        model: Callable[..., Any],
        memory: DeviceMemory,
        sampler: Sampler,
        last_token: Tensor,
        max_model_len: int,
        capture: Capture,
    ) -> None:
        slots, device = config.max_num_seqs, loaded.device
        self.buckets = Buckets(slots, config.max_num_batched_tokens)
        self.captures = self.replays = 0
        self._model, self._model_type = model, loaded.model_type
        self._memory = memory
        self._sampler = sampler
        self._last_token = last_token
        self._capture = capture
        self._packer = Packer(config.page_size, loaded.vocab_size, slots, memory.queries.nowhere)
        # One page more than a branch of full length has: a token too many may be in flight.
        self._pages = PageTables(slots, -(-max_model_len // config.page_size) + 1, device)
        self._forwards: dict[tuple[Bucket, bool], Replay] = {}
        self._draws: dict[tuple[int, Draws], Replay] = {}
        self._addresses: tuple[int, ...] = ()
        most = max(bucket.rows for bucket in self.buckets.all)
        words = max(map(num_words, self.buckets.all))
        self._buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self._raw = torch.zeros(most, loaded.vocab_size, dtype=loaded.dtype, device=device)
        self._out = torch.zeros(most * OUT, dtype=torch.float64, device=device)

    def find(self, plan: StepPlan, samples: list[SampleRow]) -> Bucket | None:
        """The bucket that a step goes into; None if it is too large for all."""
        return self.buckets.find(plan.num_tokens, len(plan.rows), len(samples)) if plan.rows else None

    @torch.no_grad()
    def capture(self) -> None:
        """Capture everything, once. Raises UnsupportedError for a model that cannot be captured."""
        jobs = [job for jobs in self._sorts() for job in jobs]
        started, before = time.monotonic(), self._capture.used_bytes()
        for job in tqdm(jobs, desc="capturing CUDA graphs", unit="graph", disable=None, leave=False):
            self._make(*job)
        self._addresses = self._memory.addresses()
        taken = self._capture.used_bytes() - before
        logger.info("%d CUDA graphs in %.1f s, %.0f MiB", len(jobs), time.monotonic() - started, taken / 2**20)

    @torch.no_grad()
    def estimate_bytes(self) -> int:
        """Memory that `capture` will take, by the two largest graphs of each sort, which are thrown away."""
        total, used = 0, self._capture.used_bytes()
        for jobs in self._sorts():
            grown = []
            for job in jobs[:2]:
                self._make(*job)
                before, used = used, self._capture.used_bytes()
                grown.append(max(0, used - before))
            total += sum(grown) + grown[-1] * max(0, len(jobs) - 2)
        self._forwards.clear()
        self._draws.clear()
        self._capture.reset()
        return total

    @torch.no_grad()
    def run(self, bucket: Bucket, plan: StepPlan, samples: list[SampleRow]) -> Tensor | None:
        """Run a step that `find` has a bucket for, and draw its samples.

        Returns token ids `[rows]` and then their statistics `[rows, NUM_STATS]`, flat and in fp64; None
        for samples that no graph can draw: then `logits` holds theirs. Raises ValueError as
        `Packer.pack` does.
        """
        captured = all(map(self._sampler.has_fixed_shapes, samples))
        self.forward(bucket, plan, samples if captured else [])
        if not captured:
            return None
        if samples:
            self._draws[bucket.rows, draws_of(samples)]()
        return self._out[: bucket.rows * OUT]

    @torch.no_grad()
    def forward(self, bucket: Bucket, plan: StepPlan, drawn: list[SampleRow]) -> None:
        """Run the model on a step that `find` has a bucket for; `drawn` are the samples that a graph will draw.

        Raises ValueError as `Packer.pack` does.
        """
        memory, rows = self._memory, plan.rows
        lines, sinks = memory.tables.rows([row.slot for row in rows]), memory.queries.place(rows)
        host = pinned(num_words(bucket), self._buffer.device)
        inputs = self._packer.pack(host.numpy(), bucket, plan, lines, sinks)
        if drawn:
            pack_samples(inputs, drawn, self._sampler)
        self._pages.update(rows)
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        self._forwards[bucket, bool(sinks[0]) or max(lines) >= 0]()
        self.replays += 1

    def logits(self, count: int) -> Tensor:
        """Logits `[count, V]` of the step that ran last, in the model's dtype."""
        return self._raw[:count]

    def check_integrity(self) -> None:
        """Raise AssertionError if a tensor that graphs know was replaced."""
        assert not self._addresses or self._addresses == self._memory.addresses(), "a captured tensor was replaced"

    def _sorts(self) -> tuple[list[tuple[Bucket, bool | Draws]], ...]:
        """What is captured: forwards by whether rows may be folded, draws by their kind; the largest first."""
        buckets = self.buckets.all
        by_rows = {bucket.rows: bucket for bucket in buckets}
        kinds = (Draws.FILTERED, Draws.FREE, Draws.GREEDY)
        return (
            list(product(buckets, (True, False))),
            list(product([by_rows[rows] for rows in sorted(by_rows, reverse=True)], kinds)),
        )

    def _make(self, bucket: Bucket, sort: bool | Draws) -> None:
        """Capture one graph; it runs once on nothing but padding."""
        blank = torch.from_numpy(self._packer.blank(bucket))
        self._buffer[: len(blank)].copy_(blank)
        try:
            if isinstance(sort, Draws):
                self._draws[bucket.rows, sort] = self._capture(partial(self._draw, bucket, sort))
            else:
                self._forwards[bucket, sort] = self._capture(partial(self._forward, bucket, sort))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnsupportedError(
                "enforce_eager",
                f"{self._model_type} cannot be captured as a CUDA graph, start with --enforce-eager: {error}",
            ) from error
        self.captures += 1

    def _forward(self, bucket: Bucket, folded: bool) -> None:
        x = views(self._buffer, bucket)
        ids = torch.where(x.late >= 0, self._last_token[x.late.clamp(min=0)], x.ids)
        nothing = x.late[:0]
        inputs = StepInputs(
            input_ids=ids[None],
            position_ids=x.positions[None],
            sample_rows=x.sample_rows,
            late_rows=nothing,
            late_slots=nothing,
            cu_seqlens_q=x.cu.int(),
            kv_lens=x.kv_lens.int(),
            page_table=self._pages.table.index_select(0, x.row_slots),
            slot_mapping=x.slots,
            summary_rows=x.summary_rows,
            sink_rows=x.sink_rows if folded else nothing,
            sink_lines=x.sink_lines if folded else nothing,
            sample_slots=x.sample_slots,
        )
        self._raw[: bucket.rows].copy_(forward(self._model, self._memory, inputs, folded=folded))

    def _draw(self, bucket: Bucket, draws: Draws) -> None:
        x, rows = views(self._buffer, bucket), bucket.rows
        token_ids, stats = self._sampler.sample_fixed(self._raw[:rows], fixed(x), draws)
        self._last_token.index_copy_(0, x.sample_slots, token_ids.clamp(min=0))
        self._out[:rows].copy_(token_ids)
        self._out[rows : rows * OUT].copy_(stats.reshape(-1))
