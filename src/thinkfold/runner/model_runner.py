"""Everything that touches the device in one step: prepare, forward, sample, hand back.

It runs what a StepPlan says; it does not know requests, queues or who owns a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.runner import forward_batch, loader, sizing
from thinkfold.runner.forward_batch import ForwardBatch, StepInputs
from thinkfold.runner.invariance import row_tile, threads_change_no_bit
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import DeviceMemory, fold_budgets
from thinkfold.runner.sampler import NUM_STATS, Drawn, Sampler, SamplerInputs
from thinkfold.runner.threads import step_threads
from thinkfold.scheduler.output import BatchRow, SampleRow, StepPlan, StepResult
from thinkfold.types import TokenLogprobs, TokenStats


@dataclass(slots=True)
class PendingStep:
    """A launched step: `values` is one flat fp64 tensor on its way to the host, the errors of `folds` last."""

    step: int
    samples: list[SampleRow]
    folds: list[int]
    fold_faults: list[tuple[int, str]]
    values: Tensor
    ready: torch.cuda.Event | None


class ModelRunner:
    """Owns the model, the KV tensor and the sampler of one device.

    `launch` returns before the device has finished (GPU) and `collect` waits for it; several
    steps may be in flight and are collected in order. `batch_invariant` pads a CPU's batches so
    that a token's logits have the same bits in every batch (fp32, dense models). `eos_token_ids`
    are all end tokens; None takes those of the model's configuration.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        end_marker_id: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        batch_invariant: bool = True,
    ) -> None:
        self._config = config
        self._loaded = loaded = loaded or loader.load(config)
        self._device = loaded.device
        self.max_model_len = _model_len(config, loaded.max_position)
        on_cpu = self._device.type == "cpu"
        self._token_tile = row_tile(loaded.model) if batch_invariant and on_cpu else 1
        may_choose = on_cpu and (not batch_invariant or threads_change_no_bit(loaded.model))
        self._threads = step_threads(fixed=not may_choose)
        self._last_token = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self._device)
        ends = loaded.eos_token_ids if eos_token_ids is None else eos_token_ids
        ends = tuple(sorted(i for i in ends if i < loaded.vocab_size))
        self._sampler = Sampler(loaded.vocab_size, config.max_num_seqs, ends, end_marker_id, self._device)
        self.budgets = fold_budgets(loaded)
        self._memory = self._allocate(2)
        self._profile(1)
        size = self.page_bytes
        pages = sizing.pool_pages(
            config,
            self.max_model_len,
            size,
            self._device,
            lambda: self._profile(config.max_num_batched_tokens),
            self._memory.later_bytes,
        )
        self._memory = self._allocate(pages, sizing.host_pages(config, size))

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    @property
    def num_pages(self) -> int:
        return self._memory.storage.num_pages

    @property
    def host_pages(self) -> int:
        """Pages of the host tier, 0 without one."""
        return self._memory.storage.host_pages

    @property
    def page_bytes(self) -> int:
        return self._memory.storage.page_bytes

    @property
    def num_layers(self) -> int:
        return self._loaded.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self._loaded.num_kv_heads

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

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step: memory work, forward, sampling. Does not wait for a GPU."""
        news = self._memory.execute(plan.memory, {row.slot: row.position for row in plan.rows})
        samples = forward_batch.samples_of(plan)
        with self._threads.step(plan.num_tokens):
            drawn = self._step(plan, samples) if plan.rows else None
        values, ready = self._send_home(drawn, [error for _, error in news.errors])
        return PendingStep(plan.step, samples, [fold_id for fold_id, _ in news.errors], news.faults, values, ready)

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step and return its tokens in the order of its samples."""
        if pending.ready is not None:
            pending.ready.synchronize()
        samples = pending.samples
        count = len(samples)
        end = pending.values.numel() - len(pending.folds)
        flat, errors = pending.values[:end], pending.values[end:].tolist()
        ids = [int(x) for x in flat[:count].tolist()]
        stats = [TokenStats(*row) for row in flat[count : count * (1 + NUM_STATS)].view(count, NUM_STATS).tolist()]
        logprobs = _logprobs(samples, ids, stats, flat[count * (1 + NUM_STATS) :])
        folds = list(zip(pending.folds, errors, strict=True))
        return StepResult(pending.step, ids, stats, logprobs, folds, pending.fold_faults)

    def _step(self, plan: StepPlan, samples: list[SampleRow]) -> Drawn:
        """Forward and sampling of a plan with rows; what is drawn and which queries are kept stays on the device."""
        memory = self._memory
        inputs, extra = forward_batch.build(
            plan,
            self._config.page_size,
            self._token_tile,
            self._device,
            self._sampler.pack(samples),
            memory.tables.rows([row.slot for row in plan.rows]),
            memory.queries.place(plan.rows),
        )
        logits = self._forward(inputs)
        drawn = self._sampler.sample(logits[: len(samples)], samples, SamplerInputs(*extra))
        self._last_token[inputs.sample_slots] = drawn.token_ids.clamp(min=0)
        return drawn

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Logits `[S, V]` of the token rows that are sampled."""
        if inputs.late_rows.numel():
            inputs.input_ids[0, inputs.late_rows] = self._last_token[inputs.late_slots]
        memory = self._memory
        query_sink, lse_sink = memory.queries.sinks(inputs.sink_rows.numel())
        batch = ForwardBatch(
            kv=memory.storage.tensor,
            cu_seqlens_q=inputs.cu_seqlens_q,
            kv_lens=inputs.kv_lens,
            page_table=inputs.page_table,
            slot_mapping=inputs.slot_mapping,
            summary_rows=inputs.summary_rows,
            summary_table=memory.tables.table,
            summary_lens=memory.tables.lens,
            bias=memory.storage.bias,
            kv_scales=memory.storage.scales,
            query_sink_rows=inputs.sink_rows,
            query_sink=query_sink,
            lse_sink=lse_sink,
        )
        output = self._loaded.model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.sample_rows,
            forward_batch=batch,
        )
        if inputs.sink_rows.numel():
            memory.queries.keep(inputs.sink_lines, query_sink, lse_sink)
        return output.logits[0]

    def _send_home(self, drawn: Drawn | None, errors: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        parts: list[Tensor] = []
        if drawn is not None:
            parts = [drawn.token_ids, drawn.stats, drawn.top_ids, drawn.top_logprobs]
        parts.append(torch.stack(errors) if errors else torch.zeros(0, device=self._device))
        flat = torch.cat([part.reshape(-1).double() for part in parts])
        if self._device.type != "cuda":
            return flat, None
        home = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        home.copy_(flat, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))  # the current device may be another one
        return home, ready

    def _allocate(self, num_pages: int, host_pages: int = 0) -> DeviceMemory:
        return DeviceMemory(self._config, self._loaded, self.budgets, self.max_model_len, num_pages, host_pages)

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
        with torch.inference_mode():
            self._forward(inputs._replace(sample_rows=keep)).float().softmax(dim=-1)


def _model_len(config: EngineConfig, max_position: int) -> int:
    if config.max_model_len is None:
        return max_position
    if config.max_model_len > max_position:
        raise ParameterError("max_model_len", f"the model reaches {max_position}, got {config.max_model_len}")
    return config.max_model_len


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
