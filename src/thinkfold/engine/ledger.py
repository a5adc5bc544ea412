"""Time: who pays for it, how long a step takes, and whose thinking must end for a deadline or a price."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from thinkfold.control.parts import PartControl
from thinkfold.engine.running import Running
from thinkfold.engine.step_time import StepTime
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.output import StepPlan
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import Phase, ThinkingEndReason
from thinkfold.types.service import MILLION

ANSWER_TOKENS = 256  # of an answer, while nobody has written one and max_tokens reserves none
SHARE = 0.9  # of the answers are no longer than what is kept for one
MARGIN = 1.1  # others may begin meanwhile, and their prompts take time
SLACK_STEPS = 4  # a step in flight, one that is planned, and the markers that close thinking


class Ledger:
    """Charges steps to requests and ends thinking in time. The clock is the caller's."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._then = clock()
        self._since_step = 0.0
        self._bounded: dict[str, Running] = {}
        self.step_time = StepTime()

    def wake(self, requests: Iterable[Running]) -> None:
        """Work comes after a time without: that time was no step's."""
        self.tick(requests)
        self._since_step = 0.0

    def tick(self, requests: Iterable[Running]) -> None:
        """Charge the time since the last call to what requests have been doing."""
        now = self._clock()
        seconds, self._then = now - self._then, now
        self._since_step += seconds
        each = seconds / max(1, len(self._scheduler.running))
        for running in requests:
            running.meter.tick([b for b in running.branches if b.status is not BranchStatus.FINISHED], seconds, each)

    def collect(self, plan: StepPlan, requests: Iterable[Running]) -> None:
        """A step has come back: its time belongs to what requests were doing in it."""
        self.tick(requests)
        tokens = plan.num_tokens
        self.step_time.observe(tokens, tokens + sum(row.kv_start for row in plan.rows), self._since_step)
        self._since_step = 0.0

    def watch(self, running: Running) -> None:
        """The request has begun; its thinking may have to end for time or money."""
        if running.request.service.bounded and running.request.thinking.enabled:
            self._bounded[running.request.request_id] = running

    def end_in_time(self) -> None:
        """Close thinking that would leave too little for the answer, by the way of a spent budget."""
        gone = [name for name, running in self._bounded.items() if running.finished]
        for name in gone:
            del self._bounded[name]
        if not self._bounded:
            return
        step_s = self._step_seconds()
        for running in self._bounded.values():
            thinkers = [(b, c) for b, c in zip(running.branches, running.controls, strict=True) if _thinks(b, c)]
            reason = self._due(running, thinkers, step_s) if thinkers else None
            if reason is not None:
                for _, control in thinkers:
                    control.end_thinking(reason)

    def _step_seconds(self) -> float:
        """Seconds that a step of the running batch takes, and a little more; 0 while nothing is known."""
        running = self._scheduler.running
        return MARGIN * self.step_time.predict(len(running), sum(b.table.kv_len for b in running))

    def _due(
        self, running: Running, thinkers: list[tuple[Branch, PartControl]], step_s: float
    ) -> ThinkingEndReason | None:
        """Why thinking must end now, if it must."""
        request, service = running.request, running.request.service
        tokens = max(self._answer_tokens(branch) for branch, _ in thinkers)
        needed = (tokens + SLACK_STEPS) * step_s
        if service.deadline_ms is not None:
            since = request.arrival_time or running.started
            if self._clock() - since + needed >= service.deadline_ms / 1000:
                return ThinkingEndReason.DEADLINE
        if service.max_cost is not None:
            answer = sum(self._answer_tokens(branch) for branch, _ in thinkers)
            share = len(thinkers) / max(1, len(self._scheduler.running))
            price = service.prices.gpu_second * needed * min(1.0, share) + service.prices.answer * answer / MILLION
            if service.prices.cost(running.bill()) + price >= service.max_cost:
                return ThinkingEndReason.COST
        return None

    def _answer_tokens(self, branch: Branch) -> int:
        """What is kept for the branch's answer: what most were, or what max_tokens reserves."""
        request = branch.request
        known = self._scheduler.tiers.answer_tokens(request.tier.name, SHARE)
        tokens = known or request.thinking.answer_reserve or ANSWER_TOKENS
        left = (request.sampling.max_tokens or tokens) - len(branch.token_ids) + branch.num_prompt_tokens
        return max(0, min(tokens, left))


def _thinks(branch: Branch, control: PartControl) -> bool:
    return branch.status is not BranchStatus.FINISHED and control.phase is Phase.THINKING and not control.ending
