"""Branches off other branches: handles, what starts from them, and going back."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from thinkfold.control.parts import PartControl
from thinkfold.engine.commands import Extend
from thinkfold.engine.handles import Handles, Kept, position_of
from thinkfold.engine.prefixes import Prefixes
from thinkfold.engine.running import Running
from thinkfold.errors import ConflictError
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.forks import share
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import EngineRequest, FinishReason, Handle, ThinkingEndReason


class Requests(Protocol):
    """The core, as orders see it."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def handles(self) -> Handles: ...
    @property
    def prefixes(self) -> Prefixes: ...
    def next_order(self) -> int:
        """Of arrival, for one more branch."""
        ...

    def begin(self, request: EngineRequest, branches: list[Branch], controls: list[PartControl]) -> None:
        """A request starts with branches that have forked already; each queues for itself."""
        ...

    def find(self, request_id: str) -> Running:
        """Raises NotFoundError."""
        ...

    def running(self) -> list[Running]:
        """Requests that have not ended, paused ones among them."""
        ...

    def tick(self) -> None:
        """Charge the time until now to what requests have been doing."""
        ...

    def touch(self, running: Running) -> None:
        """It has news, or its end is to be told."""
        ...

    def discard(self, running: Running, branch: Branch, tokens: int = 0) -> None:
        """Count what is in flight as discarded, and `tokens` more."""
        ...

    def end(self, running: Running, branch: Branch, reason: FinishReason | None = None) -> None:
        """The branch has ended; with `reason`, from outside."""
        ...


class NotYet(Exception):
    """An order must wait: it is tried again after the next step."""


class Branching:
    """The orders that make branches out of branches."""

    def __init__(self, core: Requests) -> None:
        self._core = core

    def keep(self, running: Running, branch: Branch, at: int | None = None) -> Handle:
        """A handle of the branch's state after `at` output tokens. Raises what `Handles.keep` raises."""
        self._bring(branch)
        return self._core.handles.keep(running, branch, self._core.next_order(), at)

    def keep_end(self, running: Running, branch: Branch) -> Handle:
        """The handle of a part that has ended. One that left the device with its last token in flight is forgotten."""
        if branch.table.swapped:
            self._core.scheduler.parking.forget(branch)
        return self.keep(running, branch)

    def rollback(self, running: Running, branch: Branch, at: int) -> int:
        """Let a branch with nothing in flight go on from its state after `at` output tokens, which it returns."""
        core, kv = self._core, self._core.scheduler.kv
        position, old = position_of(branch, at), len(branch.token_ids)
        fresh = Branch(branch.request, branch.index, branch.order, branch.steering, [])
        self._bring(branch)
        share(kv, branch, fresh, position, redo=True)
        control = core.handles.control_at(running, branch, position, told=False)
        known = running.controls[branch.index]
        running.forget_notes(branch.index, known.num_output_tokens - known.num_injected_tokens, control)
        paused = branch.status is BranchStatus.PAUSED
        if not paused:
            core.scheduler.pause(branch)
        core.scheduler.folds.forget(branch)
        kv.free(branch.table)
        if branch.folding is not None:
            branch.folding = branch.folding.fork(position, control.segment_ends, control.answer_start)
        branch.table, branch.num_computed_tokens = fresh.table, fresh.num_computed_tokens
        branch.token_ids, branch.stale_counts = branch.token_ids[:position], True
        branch.steering = running.controls[branch.index] = control
        if not paused:
            core.scheduler.resume(branch)
        core.discard(running, branch, min(old - position, running.own_tokens(branch.index, known)))
        running.bring_less(branch.index, control)
        return at

    def extend(self, order: Extend) -> None:
        """Start a request from a handle. Raises NotFoundError, ConflictError if it is to end thinking that is over."""
        kept = self._core.handles.use(order.handle, order.namespace)
        self._bring(kept.branch)
        known = kept.branch.request
        changes = {"temperature": order.temperature, "seed": order.seed}
        sampling = replace(known.sampling, n=order.n, **{k: v for k, v in changes.items() if v is not None})
        request = replace(
            known, request_id=order.request_id, sampling=sampling, until=order.until, arrival_time=order.arrival_time
        )
        pairs = [self._branch(kept, request, index, order.end_thinking) for index in range(order.n)]
        self._core.begin(request, [branch for branch, _ in pairs], [control for _, control in pairs])

    def _branch(
        self, kept: Kept, request: EngineRequest, index: int, end: ThinkingEndReason | None
    ) -> tuple[Branch, PartControl]:
        source, control = kept.branch, kept.control.fork(index, request.until)
        if end is not None:
            control.end_thinking(end)
        branch = Branch(request, index, self._core.next_order(), control, list(source.token_ids))
        branch.stream = source.random_stream + index
        branch.lineage = source.lineage
        share(self._core.scheduler.kv, source, branch, len(source.token_ids), redo=True)
        if source.folding is not None:
            branch.folding = source.folding.fork(len(source.token_ids), control.segment_ends, control.answer_start)
            branch.folding.hold(len(source.token_ids))
            if branch.num_computed_tokens:
                self._core.scheduler.parking.copy_queries(source, branch)
        return branch, control

    def _bring(self, branch: Branch) -> None:
        """What lies on the host comes back; where nobody will make room for it, it is computed anew."""
        scheduler = self._core.scheduler
        if not branch.table.swapped:
            return
        if branch.status is not BranchStatus.PAUSED:
            raise ConflictError(f"choice {branch.index} is on the host for want of memory")
        if scheduler.kv.swap_in(branch.table, len(scheduler.running)):
            scheduler.parking.count_swap(branch)
        elif scheduler.running:
            raise NotYet
        else:
            scheduler.parking.forget(branch)
