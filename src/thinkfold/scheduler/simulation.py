"""A scheduler without a device: made-up requests on a clock of its own, and what became of them. No torch.

The scheduler, its admission and its memory are the real ones. A step lasts as long as `StepTime`
says; every fold gets the same estimated error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from thinkfold.fold.planner import FoldPlanner
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.output import StepPlan
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.watch import Watch
from thinkfold.types import (
    AtAnswer,
    EngineRequest,
    FinishReason,
    FoldMode,
    FoldPolicy,
    FoldProfile,
    Phase,
    PromptState,
    SamplingParams,
    ThinkingPolicy,
)


@dataclass(frozen=True, slots=True)
class Work:
    """One request, in tokens. `segment_ends` are output tokens; it arrives at `arrival` seconds."""

    prompt: int
    thinking: int
    answer: int
    segment_ends: tuple[int, ...] = ()
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: of every one, of each token computed, of each stored entry read."""

    step: float = 8e-3
    token: float = 2e-5
    entry: float = 2e-8

    def scaled(self, unit: int) -> StepTime:
        """Where each simulated token and entry stands for `unit` of them, and a step for as many steps."""
        return StepTime(self.step * unit, self.token * unit, self.entry * unit * unit)

    def seconds(self, tokens: int, entries: float) -> float:
        return self.step + self.token * tokens + self.entry * entries


@dataclass(frozen=True, slots=True)
class Window:
    """What is measured: from the end of request number `ramp` on, for `completions` more (None: to the end)."""

    ramp: int = 0
    completions: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation counted between the ends of its window; times in seconds of the simulated clock.

    `forced` are branches taken off the device, by rung of the pressure ladder. A wait lasts from
    arrival to the first computed token, a latency to the last. `failed` ended with an error and
    `pages_left` were held at the very end.
    """

    completed: int
    failed: int
    steps: int
    seconds: float
    output_tokens: int
    forced: dict[str, int]
    running_mean: float
    safe_sessions: int
    kv_pool_use_mean: float
    kv_waste_share: float
    wait_p50_s: float
    wait_p99_s: float
    wait_max_s: float
    latency_p99_s: float
    folds: int
    pages_left: int

    @property
    def forced_preemptions(self) -> int:
        return sum(self.forced.values())

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Script:
    """Steering that follows a `Work`."""

    work: Work
    outputs: int = 0
    finish_reason: FinishReason | None = None
    segment_ends: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.work.thinking + self.work.answer

    @property
    def phase(self) -> Phase:
        return Phase.THINKING if self.outputs < self.work.thinking else Phase.ANSWER

    @property
    def answer_start(self) -> int | None:
        thinking = self.work.thinking
        return thinking if 0 < thinking <= self.outputs else None

    def accept(self) -> bool:
        """One more token; True if it was the last."""
        self.outputs += 1
        ends, seen = self.work.segment_ends, len(self.segment_ends)
        if seen < len(ends) and ends[seen] == self.outputs:
            self.segment_ends.append(self.outputs)
        if self.outputs >= self.length:
            self.finish_reason = FinishReason.STOP
        return self.finish_reason is not None

    def injection(self) -> tuple[int, ...]:
        return ()

    def must_wait(self, inflight: int) -> bool:
        return self.outputs + inflight >= self.length

    def allowed(self) -> None:
        return None

    def ban_eos(self, inflight: int) -> bool:
        return False


class Simulation:
    """One run of `work` through `scheduler`."""

    def __init__(
        self,
        scheduler: Scheduler,
        work: Iterable[Work] = (),
        *,
        fold: FoldPolicy | None = None,
        numbers: FoldProfile | None = None,
        budget: int | None = None,
        max_tokens: int | None = None,
        step_time: StepTime | None = None,
        clients: int | None = None,
        window: Window | None = None,
        fold_error: float = 0.0,
        depth: int = 0,
        on_end: Callable[[Branch], None] = lambda branch: None,
    ) -> None:
        """With `clients` that many requests run or wait at any time (a closed loop), else they come at their arrival.

        `budget` and `max_tokens` are what admission knows of a request beforehand. `numbers` take the place of those
        of the fold policy's profile. `on_end` hears of each request that ends, well or not, before its memory goes.
        """
        self._scheduler = scheduler
        self._coming: Iterator[Work] = iter(work)
        self._queue: deque[Work] = deque()  # of what comes, the next ones
        self._on_end = on_end
        self._fold = fold or FoldPolicy()
        self._numbers = numbers
        self._budget = budget
        self._max_tokens = max_tokens
        self._step_time = step_time or StepTime()
        self._clients = clients
        self._window = window or Window()
        self._fold_error = fold_error
        self._depth = depth
        self._clock = 0.0
        self._orders = 0
        self._arrivals: dict[int, float] = {}  # by order, until they end
        self._started: set[int] = set()
        self.waits: list[float] = []  # of what has started within the window, in seconds
        self.latencies: list[float] = []  # of what has ended within it
        self._ended = 0
        self._failed = 0
        self._tokens = 0
        self._steps = 0
        self._watch: Watch | None = None
        self._pending: deque[StepPlan] = deque()

    def run(self, *, max_steps: int = 10_000_000) -> Outcome:
        """To the end of the window or of the work. Raises RuntimeError if that is not reached."""
        for _ in range(max_steps):
            if not self._round() or self._closed():
                return self._outcome()
        raise RuntimeError(f"the simulation has not ended after {max_steps} steps")

    def feed(self, work: Work) -> None:
        """One more request, which arrives no earlier than those before it."""
        self._queue.append(work)

    def advance(self, until: float) -> None:
        """Run all steps that begin before second `until` of the simulated clock."""
        while self._clock < until and self._round():
            pass

    def _round(self) -> bool:
        """Plan a step and collect one; False, and nothing changes, if there is nothing to do."""
        self._add()
        self._open_window()
        plan = self._scheduler.plan()
        self._sweep()
        if plan is not None:
            self._pending.append(plan)
            self._note_starts()
        if self._pending and (plan is None or len(self._pending) > self._depth):
            self._collect(self._pending.popleft())
            return True
        return plan is not None or self._idle()

    def _peek(self) -> Work | None:
        if not self._queue:
            self._queue.extend(islice(self._coming, 1))
        return self._queue[0] if self._queue else None

    def _add(self) -> None:
        """Queue what has arrived."""
        while (work := self._peek()) is not None:
            if self._clients is None:
                if work.arrival > self._clock:
                    return
            elif len(self._arrivals) >= self._clients:
                return
            self._scheduler.add([self._branch(work)])
            self._queue.popleft()

    def _branch(self, work: Work) -> Branch:
        order, self._orders = self._orders, self._orders + 1
        prompt = tuple(range(order << 20, (order << 20) + work.prompt))
        phase = Phase.THINKING if work.thinking else Phase.ANSWER
        limit = self._max_tokens or work.thinking + work.answer
        request = EngineRequest(
            request_id=str(order),
            prompt_token_ids=prompt,
            prompt=PromptState(phase, 0, work.prompt),
            sampling=SamplingParams(max_tokens=limit, seed=0),
            thinking=ThinkingPolicy(work.thinking > 0, self._budget, "default"),
            fold=self._fold,
        )
        self._arrivals[order] = work.arrival if self._clients is None else self._clock
        return Branch(request, 0, order, _Script(work), list(prompt), folding=self._planner(work))

    def _planner(self, work: Work) -> FoldPlanner | None:
        if self._fold.policy is FoldMode.OFF and self._fold.at_answer is AtAnswer.KEEP:
            return None
        return FoldPlanner(self._fold, self._scheduler.kv.page_size, work.prompt, numbers=self._numbers)

    def _open_window(self) -> None:
        if self._watch is None and self._ended >= self._window.ramp:
            self._watch = Watch(self._scheduler)
            self.waits.clear()
            self.latencies.clear()
            self._tokens, self._steps = 0, 0

    def _closed(self) -> bool:
        wanted = self._window.completions
        return wanted is not None and self._watch is not None and len(self.latencies) >= wanted

    def _idle(self) -> bool:
        """Nothing runs: go on to the next arrival; False if there is none."""
        work = self._peek()
        if work is None or self._scheduler.waiting or self._scheduler.running:
            return False
        self._clock = max(self._clock, work.arrival)
        return True

    def _note_starts(self) -> None:
        for branch in self._scheduler.running:
            if branch.order not in self._started:
                self._started.add(branch.order)
                self.waits.append(self._clock - self._arrivals[branch.order])

    def _sweep(self) -> None:
        """Branches that the scheduler has ended for want of memory."""
        for branch in self._scheduler.ended:
            if branch.status is not BranchStatus.FINISHED:
                self._failed += 1
                self._arrivals.pop(branch.order)
                self._on_end(branch)
                self._scheduler.finish(branch)
        self._scheduler.ended.clear()
        self._scheduler.folds.done.clear()

    def _collect(self, plan: StepPlan) -> None:
        scheduler = self._scheduler
        entries = sum(b.table.kv_len + b.table.summary.mean_entries for b in scheduler.running)
        seconds = self._step_time.seconds(plan.num_tokens, entries)
        self._clock += seconds
        self._steps += 1
        if self._watch is not None:
            self._watch.tick(seconds)
        for prepare in plan.memory.prepares:
            scheduler.folds.judge(prepare.fold_id, self._fold_error)
        for branch, wanted in scheduler.collect(plan.step):
            if not wanted:
                continue
            self._tokens += 1
            branch.token_ids.append(0)
            assert isinstance(branch.steering, _Script)
            if branch.steering.accept():
                self._ended += 1
                self.latencies.append(self._clock - self._arrivals.pop(branch.order))
                self._on_end(branch)
                scheduler.finish(branch)

    def _outcome(self) -> Outcome:
        """Count, and end what still runs."""
        watch = self._watch or Watch(self._scheduler)
        forced = dict(watch.forced)
        for branch in list(self._scheduler.branches()):
            self._scheduler.finish(branch)
        for plan in self._pending:
            self._scheduler.collect(plan.step)
        self._scheduler.check_integrity()
        usage = Counter({str(c): n for c, n in self._scheduler.kv.usage().items()})
        return Outcome(
            completed=len(self.latencies),
            failed=self._failed,
            steps=self._steps,
            seconds=watch.seconds,
            output_tokens=self._tokens,
            forced=forced,
            running_mean=watch.running_mean,
            safe_sessions=watch.safe_sessions,
            kv_pool_use_mean=watch.kv_pool_use_mean,
            kv_waste_share=watch.kv_waste_share,
            wait_p50_s=percentile(self.waits, 0.50),
            wait_p99_s=percentile(self.waits, 0.99),
            wait_max_s=max(self.waits, default=0.0),
            latency_p99_s=percentile(self.latencies, 0.99),
            folds=watch.folds,
            pages_left=sum(usage.values()) - usage["cached"] - usage["pinned"] + self._scheduler.kv.host_usage(),
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of `values` do not exceed; 0 where there is none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else 0.0
