"""Requests that begin at any age, on the engine's own core: for benchmarks of speed. No tokenizer, no text.

A request that is not new begins with its tokens known, as after a preemption, and catches up in steps that compute
nothing: scheduler, planner, memory and folds do their work on random keys and values. Then every step is a whole one.
"""

from __future__ import annotations

import pickle
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, cast

import torch

from thinkfold.attention.fp8 import FP8
from thinkfold.config import EngineConfig
from thinkfold.control.parts import PartControl
from thinkfold.engine.capacity import reserve_pages
from thinkfold.engine.core import EngineCore
from thinkfold.engine.loop import run_core
from thinkfold.engine.messages import Command, Dead, Event, ModelInfo, News, Stop
from thinkfold.errors import ThinkfoldError
from thinkfold.kv.manager import KVManager
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import fold_budgets
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.storage import page_bytes
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import StepPlan, StepResult
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import StepTime
from thinkfold.scheduler.watch import Watch
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.family import Family
from thinkfold.thinking.markers import MarkerSet
from thinkfold.types import EngineRequest, FinishReason, TokenStats

WORD, BREAK, CLOSE = range(3)  # token ids: text, the end of a segment, the end of thinking
QUIET = 40  # steps in which nobody has caught up or been admitted, before the clock starts


@dataclass(slots=True)
class Stage:
    """Requests that are run together, and what was measured from the moment at which the aged ones had caught up.

    `aged` requests come with the number of output tokens that they have; `backlog` of the `fresh` ones always wait.
    """

    aged: list[tuple[EngineRequest, int]]
    fresh: Iterator[EngineRequest]
    backlog: int = 1
    seconds: float = inf
    gaps: list[float] = field(default_factory=list)  # between ends of steps, seconds
    held: list[float] = field(default_factory=list)  # entries of all running requests, by step
    peak: float = 0.0  # entries of one request
    host_s: float = 0.0  # seconds in which the host did not wait for the device
    tokens: int = 0
    completed: int = 0
    folds: int = 0
    forced: int = 0  # preemptions that nobody asked for
    watch: Watch | None = None


class FilledRunner:
    """A runner that only keeps memory while it is `filling`, or always if there is no model. It begins with no branch.

    `done` is called when a step that was no filling one has finished, before it is collected.
    """

    def __init__(self, runner: ModelRunner | None, num_slots: int) -> None:
        if runner is not None:
            for slot in range(num_slots):
                runner._memory.tables.set(slot, [], [])
                runner._memory.queries.forget(slot)
        self._runner = runner
        self.done: Callable[[int], None] = lambda num_tokens: None
        self.filling = False
        self.quiet = 0  # filling steps in a row in which every row had one token
        self.waited = 0.0

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> Any:
        filling, runner = self.filling, self._runner
        self.quiet = self.quiet + 1 if filling and plan.num_tokens == len(plan.rows) else 0
        if runner is None:
            return plan, filling, [(prepare.fold_id, 0.0) for prepare in plan.memory.prepares]
        if not filling:
            return plan, False, runner.launch(plan)
        news = runner._memory.execute(plan.memory, {row.slot: row.position for row in plan.rows})
        runner._memory.queries.place(plan.rows)
        if news.faults:
            raise RuntimeError(f"a fold failed: {news.faults[0][1]}")
        return plan, True, [] if news.results is None else list(zip(news.folds, news.results[:, 0], strict=True))

    def collect(self, pending: Any) -> StepResult:
        plan, filled, rest = pending
        whole = self._runner is not None and not filled
        if whole and rest.ready is not None:
            started = time.perf_counter()
            rest.ready.synchronize()
            self.waited += time.perf_counter() - started
        if not filled:
            self.done(plan.num_tokens)
        if self._runner is not None and whole:
            return self._runner.collect(rest)
        samples = [sample for row in plan.rows for sample in row.samples]
        ids, stats = [sample.forced_token for sample in samples], TokenStats(0.0, 0.0, 0.0, 0.0)
        errors = [(fold_id, float(error)) for fold_id, error in rest]
        return StepResult(plan.step, ids, [stats] * len(ids), [None] * len(ids), errors)


class StagedCore:
    """A core that runs stages one after the other and times their steps; it is its own inbox, too."""

    def __init__(
        self, core: EngineCore, runner: FilledRunner, stages: Iterable[Stage], step_time: StepTime | None
    ) -> None:
        """Steps last as long as `step_time` says, or as they do."""
        self._core, self._runner = core, runner
        runner.done = self._note
        self._stages = list(stages)
        self._step_time = step_time
        self._clock = self._then = self._begun = self._idle = 0.0
        self._stage: Stage | None = None
        self._ready: deque[EngineRequest] = deque()
        self._ages: dict[str, int] = {}
        self._given = 0  # that the core has not seen yet
        self._tokens = 0
        self.completed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def add(self, request: EngineRequest) -> None:
        """A request that has an age begins as if it had been preempted there."""
        core, age = self._core, self._ages.pop(request.request_id, 0)
        self._given -= 1
        if not age:
            core.add(request)
            return
        control, known = core._make_control(request, 0), request.sampling.forced_tokens[:age]
        control.replay(known, [], told=True)
        tokens = [*request.prompt_token_ids, *known]
        branch = Branch(request, 0, core.next_order(), control, tokens, folding=core._planner(request))
        core.begin(request, [branch], [control])

    def advance(self) -> None:
        self._core.advance()
        if self._runner.filling and self._runner.quiet >= QUIET:
            for branch in list(self._core.scheduler.waiting):
                self._core.abort(branch.request.request_id)
            self._start()

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        """What the core does next. To be asked for something to wait for means that a stage has ended."""
        stage = self._stage
        if stage is not None and stage.gaps and self._now() - self._begun >= stage.seconds:
            self._close()
            return Stop()
        if not self._ready and stage is not None and not self._runner.filling:
            missing = stage.backlog - len(self._core.scheduler.waiting) - self._given
            self._ready += [request for _, request in zip(range(missing), stage.fresh, strict=False)]
        if not self._ready and block:
            self._close()
            if not self._stages:
                return Stop()
            self._open(self._stages.pop(0))
            return self.get(False)
        if not self._ready:
            raise queue.Empty
        self._given += 1
        return self._ready.popleft()

    def _open(self, stage: Stage) -> None:
        self._stage = stage
        self._core.scheduler.kv.clear_cache()
        self._ages = {request.request_id: age for request, age in stage.aged}
        self._ready += [request for request, _ in stage.aged]
        self._runner.quiet, self._runner.filling = 0, bool(stage.aged)
        if not stage.aged:
            self._start()

    def _start(self) -> None:
        """From now on every step is a whole one and counts."""
        assert self._stage is not None
        self._runner.filling = False
        self._stage.watch = Watch(self._core.scheduler)
        self._begun = self._then = self._now()
        self._idle = self._runner.waited - time.perf_counter()
        self._tokens, self.completed = self._core.stats().generated_tokens, 0

    def _now(self) -> float:
        return time.perf_counter() if self._step_time is None else self._clock

    def _note(self, num_tokens: int) -> None:
        """A step has finished."""
        stage = self._stage
        assert stage is not None and stage.watch is not None, "steps are whole ones when the clock runs"
        held = [b.table.kv_len + b.table.summary.mean_entries for b in self._core.scheduler.running]
        stage.held.append(sum(held))
        stage.peak = max(stage.peak, *held, 0.0)
        if self._step_time is not None:
            self._clock += self._step_time.seconds(num_tokens, stage.held[-1])
        now = self._now()
        stage.gaps.append(now - self._then)
        stage.watch.tick(now - self._then)
        self._then = now

    def _close(self) -> None:
        if (stage := self._stage) is not None:
            stage.tokens = self._core.stats().generated_tokens - self._tokens
            stage.host_s = time.perf_counter() - self._runner.waited + self._idle
            stage.completed = self.completed
            if stage.watch is not None:
                stage.folds, stage.forced = stage.watch.folds, stage.watch.forced.total()
        self._stage = None


def make_core(config: EngineConfig, model: LoadedModel, runner: FilledRunner, num_pages: int) -> EngineCore:
    """The engine's core, as `build_core` makes it but without a tokenizer: a token is a letter or a marker."""
    texts = (b"a", b"\n\n", b"</think>") + (b"a",) * (model.vocab_size - 3)
    vocabulary = Vocabulary(texts, frozenset(), frozenset())
    family = Family("forced", vocabulary, MarkerSet(ends=((CLOSE,),)), MarkerSet())
    size, budgets, (_, numbers) = config.page_size, fold_budgets(model), config.fold_numbers
    kv = KVManager(
        num_pages,
        size,
        enable_prefix_caching=True,
        num_heads=model.num_layers * model.num_kv_heads,
        reserve_pages=reserve_pages(budgets, config, num_pages),
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        fold_counts=cache(lambda entries, tokens: budgets.counts(entries, tokens, size)),
        admission=Admission(kv.capacity * size, size, config.admission_risk) if config.admission != "greedy" else None,
    )
    limits = {"min_segment_tokens": numbers.min_segment_tokens, "max_segment_tokens": 2 * numbers.max_segment_tokens}
    return EngineCore(
        runner,
        scheduler,
        lambda request, branch: PartControl(request, branch, vocabulary, family, **limits),
        page_bytes=page_bytes(model.num_layers, model.num_kv_heads, size, model.head_dim, model.dtype),
        pipeline_depth=int(model.device.type != "cpu"),
    )


def stored_page_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Bytes of a page as an engine with graphs stores it: with scales for fp8, and β."""
    dtype = FP8 if config.kv_cache_dtype == "fp8_e4m3" else model.dtype
    return page_bytes(model.num_layers, model.num_kv_heads, config.page_size, model.head_dim, dtype, bias=True)


def filled_runner(config: EngineConfig, model: LoadedModel) -> ModelRunner:
    """A runner whose memory is full of random numbers."""
    runner = ModelRunner(config, loaded=model)
    storage = runner._memory.storage
    for page in storage.tensor.split(256):
        page.copy_(torch.randn(page.shape, device=page.device, dtype=torch.bfloat16))
    storage.scales.fill_(0.01)
    return runner


def run_stages(
    config: EngineConfig, model: LoadedModel, stages: Iterable[Stage], device: ModelRunner | StepTime
) -> None:
    """Run stages one after the other and measure them, on a runner or on a clock of steps that long.

    Nothing is left of what a runner has run before. Raises ThinkfoldError where the core or a request fails.
    """
    if isinstance(device, ModelRunner):
        runner, step_time, num_pages = FilledRunner(device, config.max_num_seqs), None, device.num_pages
    else:
        runner, step_time = FilledRunner(None, config.max_num_seqs), device
        num_pages = (config.kv_cache_bytes or 0) // stored_page_bytes(config, model)
    core = StagedCore(make_core(config, model, runner, num_pages), runner, stages, step_time)
    errors: list[str] = []

    def send(event: Event) -> None:
        pickle.dumps(event)  # as for a client in another process
        if isinstance(event, Dead) and event.reason:
            errors.append(event.reason)
        for output in event.outputs if isinstance(event, News) else ():
            if output.error is not None:
                errors.append(output.error)
            reasons = {branch.finish_reason for branch in output.outputs}
            core.completed += output.finished and FinishReason.ABORT not in reasons

    run_core(lambda _: (cast(EngineCore, core), cast(ModelInfo, None)), config, core, send)
    if errors:
        raise ThinkfoldError(f"{len(errors)} errors, the first: {errors[0]}")
