"""The step loop: plan, launch, collect, control, update. Knows tokens, not HTTP.

With `pipeline_depth` 1 the plan of a step is launched before the former step is collected:
what is found at collect (an end, a replaced token, an injection) discards the one token
already launched. Both depths give equal tokens.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from thinkfold.control.parts import PartControl
from thinkfold.engine.costs import CostMeter
from thinkfold.engine.counters import counters
from thinkfold.engine.device import OtherRanks, Runner
from thinkfold.engine.handles import Handles
from thinkfold.engine.ledger import Ledger
from thinkfold.engine.messages import EngineStats
from thinkfold.engine.orders import Orders
from thinkfold.engine.prefixes import Prefixes
from thinkfold.engine.running import Running, refusal
from thinkfold.errors import NotFoundError, RequestFailedError
from thinkfold.fold.planner import FoldPlanner
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.output import StepPlan, StepResult
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import (
    AtAnswer,
    CompletionOutput,
    EngineRequest,
    FinishReason,
    FoldMode,
    Phase,
    RequestOutput,
)


class EngineCore:
    """Runs requests to their end; every accepted request gets exactly one final output."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        make_control: Callable[[EngineRequest, int], PartControl],
        *,
        page_bytes: int,
        pipeline_depth: int = 0,
        window: int = 0,
        clock: Callable[[], float] = time.monotonic,
        max_handles: int = 64,
        handle_ttl_s: float = 300.0,
        pin_share: float = 0.25,
        kv_quantisation_error: float = 0.0,
    ) -> None:
        self._runner = runner
        self.ranks: OtherRanks | None = None
        self._scheduler = scheduler
        self._make_control = make_control
        self._page_bytes = page_bytes
        self._depth = pipeline_depth
        self._window = window
        self._clock = clock
        self._requests: dict[str, Running] = {}
        self._inflight: deque[tuple[StepPlan, Any]] = deque()
        self._arrivals = 0
        self._ledger = Ledger(scheduler, clock)
        self._outputs: list[RequestOutput] = []
        self._touched: dict[str, Running] = {}  # what has news
        self._urgent = False
        self.handles = Handles(scheduler, make_control, clock, most=max_handles, ttl_s=handle_ttl_s)
        self.prefixes = Prefixes(scheduler.kv, scheduler.ahead, clock, pin_share)
        self.orders = Orders(self)
        self._stats = EngineStats(pages_total=scheduler.kv.num_pages, kv_quantisation_error=kv_quantisation_error)
        self._reasons: Counter[str] = Counter()
        self._thinking_reasons: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether something runs or is to be told."""
        return self.has_news or not self.idle

    @property
    def idle(self) -> bool:
        """Whether no step changes anything: paused requests change nothing by themselves."""
        busy = self._inflight or self._scheduler.sides.branches or self._scheduler.ahead
        return not busy and all(running.idle for running in self._requests.values())

    @property
    def has_requests(self) -> bool:
        """Whether somebody waits for an end, paused requests included."""
        return bool(self._requests)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def add(self, request: EngineRequest) -> None:
        """Accept a request; if it cannot be prepared, it alone ends with an error."""
        try:
            count = request.sampling.n
            controls = [self._make_control(request, index) for index in range(count)]
            branches = [
                Branch(
                    request,
                    index,
                    self._arrivals + index,
                    control,
                    list(request.prompt_token_ids),
                    folding=self._planner(request),
                )
                for index, control in enumerate(controls)
            ]
        except Exception as error:  # rule: one request's preparation fails that request
            self._outputs.append(refusal(request, error))
            self._urgent = True
            self._reasons[FinishReason.ERROR] += 1
            return
        self._arrivals += count
        self._accept_request(request, branches, controls)
        self._scheduler.add(branches)

    def begin(self, request: EngineRequest, branches: list[Branch], controls: list[PartControl]) -> None:
        """A request starts with branches that have forked already; each queues for itself."""
        self._accept_request(request, branches, controls)
        self._scheduler.waiting.extend(branches)

    def next_order(self) -> int:
        """Of arrival, for one more branch."""
        self._arrivals += 1
        return self._arrivals - 1

    def _accept_request(self, request: EngineRequest, branches: list[Branch], controls: list[PartControl]) -> None:
        meter = CostMeter(len(request.prompt_token_ids), self._scheduler.kv.page_size, self._page_bytes)
        meter.costs.queue_s = max(0.0, self._clock() - request.arrival_time) if request.arrival_time else 0.0
        before = [(c.num_thinking_tokens, c.num_output_tokens, c.num_injected_tokens) for c in controls]
        running = Running(request, branches, controls, meter, before, started=self._clock())
        if not self.has_work:
            self._ledger.wake(self._requests.values())
        self._requests[request.request_id] = running
        self._ledger.watch(running)

    def _planner(self, request: EngineRequest) -> FoldPlanner | None:
        """What folds a branch of the request; None where nothing is ever folded or moved."""
        policy = request.fold
        if policy.policy is FoldMode.OFF and policy.at_answer is AtAnswer.KEEP:
            return None
        return FoldPlanner(policy, self._scheduler.kv.page_size, len(request.prompt_token_ids), self._window)

    def abort(self, request_id: str) -> None:
        """End a request now and return its memory; unknown ids are ignored."""
        running = self._requests.get(request_id)
        if running is None:
            self.orders.withdraw(request_id)  # it may be about to begin
            return
        for branch in running.branches:
            self.end(running, branch, FinishReason.ABORT)

    def find(self, request_id: str) -> Running:
        """A request that has not ended. Raises NotFoundError."""
        running = self._requests.get(request_id)
        if running is None or running.finished:
            raise NotFoundError(f"there is no running response {request_id!r:.100}")
        return running

    def running(self) -> list[Running]:
        """Requests that have not ended."""
        return [running for running in self._requests.values() if not running.finished]

    def touch(self, running: Running) -> None:
        """The request has news, or an end that is to be told."""
        self._touched[running.request.request_id] = running

    @property
    def has_news(self) -> bool:
        """Whether `news` may have something to tell."""
        return bool(self._outputs or self._touched)

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for the first output of a request, or for its last one."""
        return self._urgent

    def step(self) -> list[RequestOutput]:
        """`advance`, and the news of all requests."""
        self.advance()
        return self.news()

    def advance(self) -> None:
        """Launch one step and collect the one that is due.

        Raises RuntimeError if requests are left and nothing can ever run.
        """
        self._ledger.end_in_time()
        plan = self._scheduler.plan()
        self._sweep_ended()
        self._sweep_folds()
        self.orders.probes.sweep()
        self.prefixes.sweep()
        if plan is not None:
            self._inflight.append((plan, self._runner.launch(plan)))
        due = bool(self._inflight) and (plan is None or len(self._inflight) > self._depth)
        if due:
            self._collect(*self._inflight.popleft())
        self.orders.retry()
        if not (plan or due or self.has_news or self.idle):
            raise RuntimeError(f"{len(self._requests)} requests are left and none can run")

    def _collect(self, plan: StepPlan, pending: Any) -> None:
        result = self._runner.collect(pending)
        self._ledger.collect(plan, self._requests.values())
        folds = self._scheduler.folds
        for fold_id, error in result.fold_errors:
            folds.judge(fold_id, error)
        faults = [(folds.owner(fold_id), message) for fold_id, message in result.fold_faults]
        draws = self._scheduler.collect(plan.step)
        for branch, message in faults:
            if branch is not None and branch.status is not BranchStatus.FINISHED:
                self._fail(
                    self._requests[branch.request.request_id], branch, RequestFailedError(f"a fold failed: {message}")
                )
        self._stats.steps += 1
        for index, (branch, wanted) in enumerate(draws):
            if wanted and branch.status is BranchStatus.SIDE:
                self.orders.probes.accept(branch, result, index)
            elif wanted and branch.status is not BranchStatus.FINISHED:  # a sibling may have failed a line above
                self._accept(self._requests[branch.request.request_id], branch, result, index)

    def _accept(self, running: Running, branch: Branch, result: StepResult, index: int) -> None:
        """One drawn token of a live branch: ask its control, then update the branch."""
        self.touch(running)
        self._urgent |= not running.begun
        running.begun = True
        token = result.token_ids[index]
        if token < 0:
            running.error = running.error or f"choice {branch.index}: the model's logits are not finite"
            self.end(running, branch, FinishReason.ERROR)
            return
        control = running.controls[branch.index]
        try:
            before = control.phase
            verdict = control.accept(token)
            phase = None if control.last_token_is_silent else before
        except Exception as error:  # rule: one request's control fails that request
            self._fail(running, branch, error)
            return
        self._note(running, branch, result, index, phase)
        branch.token_ids.append(verdict.token_id)
        self._stats.generated_tokens += 1
        if verdict.inject or verdict.redraw or verdict.token_id != token:
            position = len(branch.token_ids) - 1
            branch.token_ids += verdict.inject
            self.discard(running, branch)
            branch.drop_inflight()
            if verdict.token_id != token or not verdict.inject:
                self._scheduler.rewind(branch, position)
        if verdict.finish is not None:
            self.end(running, branch)

    def _note(self, running: Running, branch: Branch, result: StepResult, index: int, phase: Phase | None) -> None:
        logprobs, stats = running.notes.setdefault(branch.index, ([], []))
        stats.append(result.stats[index])
        entry = result.logprobs[index]
        if entry is not None:
            logprobs.append(replace(entry, phase=phase))

    def _sweep_ended(self) -> None:
        """Branches whose control ended or failed while the step was planned."""
        for branch in self._scheduler.ended:
            running = self._requests.get(branch.request.request_id)
            if running is None or branch.status is BranchStatus.FINISHED:
                continue
            if branch.error is not None:
                self._fail(running, branch, branch.error)
            elif branch.steering.finish_reason is not None:
                self.end(running, branch)
        self._scheduler.ended.clear()

    def _sweep_folds(self) -> None:
        """Folds and refusals of the plan just made: news of their requests."""
        for branch, fold in self._scheduler.folds.done:
            running = self._requests.get(branch.request.request_id)
            if running is not None:
                running.folds.setdefault(branch.index, []).append(fold)
                running.meter.count_fold(fold)
                self.touch(running)
        self._scheduler.folds.done.clear()

    def _fail(self, running: Running, branch: Branch, error: Exception) -> None:
        """The control of a branch has raised: its request ends."""
        running.error = running.error or f"choice {branch.index}: {type(error).__name__}: {error}"
        for each in running.branches:
            self.end(running, each, FinishReason.ERROR)

    def end(self, running: Running, branch: Branch, reason: FinishReason | None = None) -> None:
        """A branch has ended, with `reason` from outside: then its control flushes held text."""
        if branch.status is BranchStatus.FINISHED:
            return
        if reason is not None:
            try:
                running.controls[branch.index].finish(reason)
            except Exception as error:
                running.error = running.error or f"choice {branch.index}: {type(error).__name__}: {error}"
        elif branch.steering.finish_reason is FinishReason.BOUNDARY:
            running.handles[branch.index] = self.orders.branching.keep_end(running, branch)
        self.touch(running)
        self._urgent = True
        self.discard(running, branch)
        self.orders.probes.close(running, branch)
        self._scheduler.finish(branch)

    def discard(self, running: Running, branch: Branch, tokens: int = 0) -> None:
        """Tokens of a branch that are in flight will not be used, nor `tokens` of its output."""
        running.meter.costs.discarded_tokens += branch.inflight + tokens
        self._stats.discarded_tokens += branch.inflight + tokens

    def tick(self) -> None:
        """Charge the time since the last call to what requests have been doing."""
        self._ledger.tick(self._requests.values())

    def news(self) -> list[RequestOutput]:
        """What has become of all requests since the last call."""
        self._urgent = False
        outputs, self._outputs = self._outputs, []
        touched, self._touched = self._touched, {}
        for request_id, running in touched.items():
            news = [o for o in (self._take(running, branch) for branch in running.branches) if o is not None]
            finished = running.finished
            if news or finished:
                outputs.append(self._output(running, news, finished))
            if finished:
                self._stats.add(running.meter.costs, aside=running.request.aside)
                self.orders.close(running)
                del self._requests[request_id]
                self._touched.pop(request_id, None)
        return outputs

    def _take(self, running: Running, branch: Branch) -> CompletionOutput | None:
        """The news of a branch; when it has ended, one last output says so whatever its control does."""
        index, output = branch.index, None
        if index in running.told:
            return None
        try:
            output = running.controls[index].take()
        except Exception as error:
            self._fail(running, branch, error)
        if branch.status is BranchStatus.FINISHED:
            running.told.add(index)
            output = output or CompletionOutput(index=index)
            output.finish_reason = output.finish_reason or FinishReason.ERROR
            self._reasons[output.finish_reason] += not running.request.aside
            if output.thinking_end_reason is not None:
                self._thinking_reasons[output.thinking_end_reason] += 1
        if output is not None and branch.status is BranchStatus.FINISHED:
            output.handle = running.handles.get(index)
        if index in running.folds:
            output = output or running.controls[index].snapshot()
            output.folds = running.folds.pop(index)
        if output is not None and index in running.notes:
            output.logprobs, output.stats = running.notes.pop(index)
        return output

    def _output(self, running: Running, news: list[CompletionOutput], finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=running.request.request_id,
            outputs=news,
            policy=running.request.thinking,
            fold=running.request.fold,
            limits=running.request.limits,
            costs=copy(running.bill()),
            finished=finished,
            error=running.error if finished else None,
        )

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        return replace(
            self._stats,
            **counters(self._scheduler),
            handles=len(self.handles),
            probe_tokens=self._stats.probe_tokens + self.orders.probes.tokens,
            ahead_tokens=self.prefixes.ahead_tokens,
            warm_tokens=self.prefixes.warm_tokens,
            requests_by_reason={str(reason): n for reason, n in self._reasons.items()},
            thinking_by_reason={str(reason): n for reason, n in self._thinking_reasons.items()},
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless all structures agree."""
        self._scheduler.check_integrity()
