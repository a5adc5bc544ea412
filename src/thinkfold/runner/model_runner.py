"""Everything that touches the device in one step: prepare, forward, sample, hand back.

It runs what a StepPlan says; it does not know requests, queues or who owns a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from thinkfold.config import EngineConfig
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.runner import forward_batch, loader, sizing
from thinkfold.runner.compiled import compile_model
from thinkfold.runner.forward import forward
from thinkfold.runner.graph_passes import Backend
from thinkfold.runner.graphs import Capture, CudaCapture, StepGraphs
from thinkfold.runner.invariance import row_tile, threads_change_no_bit
from thinkfold.runner.kv_check import stored_dtype
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import DeviceMemory, FoldNews, fold_budgets
from thinkfold.runner.sampler import NUM_STATS, Sampler, SamplerInputs
from thinkfold.runner.threads import step_threads
from thinkfold.runner.transfer import IntArray, to_device
from thinkfold.scheduler.output import BatchRow, SampleRow, StepPlan, StepResult
from thinkfold.types import TokenLogprobs, TokenStats


@dataclass(slots=True)
class PendingStep:
    """A launched step, and its results on their way to the host as one flat fp64 tensor.

    `values` are `width` token ids and as many rows of statistics, of which the first belong to
    `samples`; then top ids and log-probs; then what `news` calls its results.
    """

    step: int
    samples: list[SampleRow]
    news: FoldNews
    width: int
    values: Tensor
    ready: torch.cuda.Event | None


class ModelRunner:
    """Owns the model, the KV tensor and the sampler of one device: of all there is, or of one rank.

    `launch` returns before the device has finished (GPU) and `collect` waits for it; several
    steps may be in flight and are collected in order. `batch_invariant` pads a CPU's batches so
    that a token's logits have the same bits in every batch (fp32, dense models). `eos_token_ids`
    are all end tokens; None takes those of the model's configuration. `capture` makes CUDA graphs;
    None takes the device's own, if the configuration and the attention allow it. With graphs the
    model is compiled by `compiler`, a backend of `torch.compile`; None takes torch's default on a GPU.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        end_marker_id: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        batch_invariant: bool = True,
        capture: Capture | None = None,
        compiler: str | Backend | None = None,
    ) -> None:
        self._config = config
        self._loaded = loaded = loaded or loader.load(config)
        self._device = loaded.device
        self.max_model_len = sizing.model_len(config, loaded.max_position)
        on_cpu = self._device.type == "cpu"
        self._shard = loaded.shard
        tile = row_tile(loaded.model) if batch_invariant and on_cpu else 1
        self._token_tile = max(self._shard.numbers(tile))
        may_choose = on_cpu and (not batch_invariant or threads_change_no_bit(loaded.model))
        self._threads = step_threads(fixed=not may_choose)
        # One more than there are slots: padding of a captured step has a place, too.
        self._last_token = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=self._device)
        ends = loaded.eos_token_ids if eos_token_ids is None else eos_token_ids
        ends = tuple(sorted(i for i in ends if i < loaded.vocab_size))
        backend = loader.pick_attention(config.attention_backend, self._device)
        self._sampler = Sampler(loaded.vocab_size, config.max_num_seqs, ends, end_marker_id, self._device, backend)
        budgets = fold_budgets(loaded)
        self.kv_dtype, self.fp8_error = stored_dtype(config, loaded, budgets, self._token_tile)
        self._memory = DeviceMemory(config, loaded, budgets, self.max_model_len, self.kv_dtype, 2)
        self._model: Callable[..., Any] = loaded.model
        self.graphs = self._make_graphs(capture or _own_capture(config, self._device), compiler)
        self._profile(2)
        self._take_pages()
        if self.graphs is not None:
            self._memory.make_kernels()
            self.graphs.capture()

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    @property
    def budgets(self) -> FoldBudgets:
        return self._memory.budgets

    @property
    def num_pages(self) -> int:
        return self._memory.storage.num_pages

    @property
    def host_pages(self) -> int:
        """Pages of the host tier, 0 without one."""
        return self._memory.storage.host_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on all ranks."""
        return self._memory.storage.page_bytes * self._shard.size

    @property
    def num_layers(self) -> int:
        return self._loaded.num_layers

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer that all ranks hold."""
        return self._loaded.num_kv_heads * self._shard.size

    @property
    def shards(self) -> int:
        """Over how many ranks the model is split."""
        return self._shard.size

    @property
    def window(self) -> int:
        """Tokens that layers with a sliding window see; 0 where all see everything."""
        return self._memory.window

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._loaded.eos_token_ids

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._loaded.tokenizer

    @property
    def model_type(self) -> str:
        return self._loaded.model_type

    @property
    def device(self) -> torch.device:
        return self._device

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step: memory work, forward, sampling. Does not wait for a GPU."""
        with torch.no_grad():
            news = self._memory.execute(plan.memory, {row.slot: row.position for row in plan.rows})
            samples = forward_batch.samples_of(plan)
            with self._threads.step(plan.num_tokens):
                parts, width = self._step(plan, samples) if plan.rows else ([], 0)
            if samples:
                self._shard.tell(self._last_token)
            if news.results is not None:
                parts.append(news.results)
            values, ready = self._send_home(parts)
        return PendingStep(plan.step, samples, news, width, values, ready)

    def follow(self, plan: StepPlan) -> None:
        """Do a rank's part of a step whose tokens rank 0 draws; of `plan.rows` it needs to know how many those are."""
        with torch.no_grad():
            self._memory.execute(plan.memory, {row.slot: row.position for row in plan.rows})
            if not plan.rows:
                return
            samples = forward_batch.samples_of(plan)
            with self._threads.step(plan.num_tokens):
                bucket = self.graphs.find(plan, samples) if self.graphs is not None else None
                if self.graphs is None or bucket is None:
                    self._forward(plan, [])
                else:
                    self.graphs.forward(bucket, plan, [])
            if samples:
                self._shard.tell(self._last_token)

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step and return its tokens in the order of its samples."""
        if pending.ready is not None:
            pending.ready.synchronize()
        samples, width, news = pending.samples, pending.width, pending.news
        count, own = len(samples), len(news.folds) + len(news.others)
        flat, results = pending.values.split([pending.values.numel() - 2 * own, 2 * own])
        ids = [int(x) for x in flat[:count].tolist()]
        rows = flat[width : width * (1 + NUM_STATS)].view(width, NUM_STATS)[:count].tolist()
        stats = [TokenStats(*row) for row in rows]
        logprobs = _logprobs(samples, ids, stats, flat[width * (1 + NUM_STATS) :])
        errors, faults = news.told(results.view(-1, 2).tolist())
        return StepResult(pending.step, ids, stats, logprobs, errors, faults)

    def _step(self, plan: StepPlan, samples: list[SampleRow]) -> tuple[list[Tensor], int]:
        """Forward and sampling of a plan with rows: what goes home, and how many rows it has.

        What is drawn and which queries are kept stays on the device, too.
        """
        bucket = self.graphs.find(plan, samples) if self.graphs is not None else None
        if self.graphs is None or bucket is None:
            return self._step_eagerly(plan, samples)
        drawn = self.graphs.run(bucket, plan, samples)
        if drawn is not None:
            return [drawn], bucket.rows
        arrays = to_device([*self._sampler.pack(samples), [sample.slot for sample in samples]], self._device)
        return self._sample(self.graphs.logits(len(samples)), samples, SamplerInputs(*arrays[:-1]), arrays[-1])

    def _step_eagerly(self, plan: StepPlan, samples: list[SampleRow]) -> tuple[list[Tensor], int]:
        logits, slots, extra = self._forward(plan, self._sampler.pack(samples))
        return self._sample(logits[: len(samples)], samples, SamplerInputs(*extra), slots)

    def _forward(self, plan: StepPlan, extra: list[IntArray]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits of a plan's samples, with padding, their slots, and `extra` on the device."""
        memory = self._memory
        inputs, there = forward_batch.build(
            plan,
            self._config.page_size,
            self._token_tile,
            self._device,
            extra,
            memory.tables.rows([row.slot for row in plan.rows]),
            memory.queries.place(plan.rows),
        )
        if inputs.late_rows.numel():
            inputs.input_ids[0, inputs.late_rows] = self._last_token[inputs.late_slots]
        return forward(self._model, memory, inputs), inputs.sample_slots, there

    def _sample(
        self, logits: Tensor, samples: list[SampleRow], inputs: SamplerInputs, slots: Tensor
    ) -> tuple[list[Tensor], int]:
        drawn = self._sampler.sample(logits, samples, inputs)
        self._last_token[slots] = drawn.token_ids.clamp(min=0)
        return list(drawn), len(samples)

    def _send_home(self, parts: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        wide = [part.reshape(-1).double() for part in parts if part.numel()]
        flat = wide[0] if len(wide) == 1 else torch.cat(wide or [torch.zeros(0, dtype=torch.float64)])
        if self._device.type != "cuda":
            return flat, None
        home = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        home.copy_(flat, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))  # the current device may be another one
        return home, ready

    def _make_graphs(self, capture: Capture | None, compiler: str | Backend | None) -> StepGraphs | None:
        """Everything that a captured step needs but the graphs, while memory has few pages."""
        if capture is None:
            return None
        memory = self._memory
        memory.reserve()
        memory.resize(2)
        config, loaded = self._config, self._loaded
        compiler = compiler or ("inductor" if self._device.type == "cuda" else None)
        if compiler is not None:
            self._model = compile_model(loaded, memory, config.page_size, compiler)
        length = self.max_model_len
        return StepGraphs(config, loaded, self._model, memory, self._sampler, self._last_token, length, capture)

    def _take_pages(self) -> None:
        """Give memory as many pages as the configuration says or the device has room for."""
        config, memory = self._config, self._memory
        later = memory.later_bytes
        if self.graphs is not None and config.kv_cache_bytes is None:
            later += self.graphs.estimate_bytes()
        largest = partial(self._profile, config.max_num_batched_tokens)
        pages = sizing.pool_pages(config, self.max_model_len, memory.page_bytes, self._device, largest, later)
        host_pages = sizing.host_pages(config, memory.page_bytes)
        memory.resize(min(self._shard.numbers(pages)), min(self._shard.numbers(host_pages)))

    def _profile(self, num_tokens: int) -> None:
        """One forward of `num_tokens` tokens, one page each, every sampling slot in use."""
        size = self._config.page_size
        starts = range(0, num_tokens, size)
        rows = [
            BatchRow(0, [0] * min(size, num_tokens - s), from_slot=False, position=0, kv_start=0, pages=[0])
            for s in starts
        ]
        plan = StepPlan(0, rows)
        inputs, _ = forward_batch.build(plan, size, self._token_tile, self._device, [], [-1] * len(rows))
        keep = torch.zeros(min(num_tokens, self._config.max_num_seqs), dtype=torch.int64, device=self._device)
        with torch.no_grad():
            forward(self._model, self._memory, inputs._replace(sample_rows=keep)).float().softmax(dim=-1)


def _own_capture(config: EngineConfig, device: torch.device) -> Capture | None:
    """CUDA graphs, where the attention never waits for the device and the configuration does not forbid them."""
    if config.enforce_eager or loader.pick_attention(config.attention_backend, device) != "triton":
        return None
    return CudaCapture(device)


def _logprobs(
    samples: list[SampleRow], ids: list[int], stats: list[TokenStats], flat: Tensor
) -> list[TokenLogprobs | None]:
    """Log-probs of the rows that asked; `flat` holds top ids, then top log-probs, `[A, k]` each."""
    asked = sum(1 for s in samples if s.params.logprobs)
    width = flat.numel() // (2 * asked) if asked else 0
    tops = iter(flat.view(2, asked, width).unbind(1) if asked else ())
    result: list[TokenLogprobs | None] = []
    for sample, token_id, stat in zip(samples, ids, stats, strict=True):
        number = sample.params.logprobs
        if number is None:
            result.append(None)
            continue
        top: tuple[tuple[int, float], ...] = ()
        if number:
            top_ids, top_values = next(tops)[:, :number].tolist()
            top = tuple((int(i), value) for i, value in zip(top_ids, top_values, strict=True))
        result.append(TokenLogprobs(token_id, stat.logprob, top))
    return result
