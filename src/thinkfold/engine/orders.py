"""Does what is asked of running requests, between two steps of the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from thinkfold.control.budget import changed_policy
from thinkfold.engine.branching import Branching, NotYet, Requests
from thinkfold.engine.commands import (
    Answer,
    Cancel,
    Drop,
    EndThinking,
    Extend,
    Forget,
    Fork,
    Hash,
    Inject,
    ListPins,
    Order,
    Pause,
    Prefill,
    Probe,
    Resume,
    Rollback,
    SetBudget,
    Unpin,
)
from thinkfold.engine.handles import state_hash
from thinkfold.engine.probes import Probes
from thinkfold.engine.running import Running
from thinkfold.errors import ConflictError, NotFoundError, ThinkfoldError
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.types import UNLIMITED, EngineRequest, FinishReason, Handle

_LATER = object()  # the answer comes by itself


def changed_budget(request: EngineRequest, budget: int) -> EngineRequest:
    """The request with another thinking budget, within its tier's and its session's: nobody leaves them while running.

    Raises ParameterError, ConflictError.
    """
    ceilings = (request.tier.budget, request.service.session_budget)
    most = min((each for each in ceilings if each is not None), default=None)
    if most is not None and (budget == UNLIMITED or budget > most):
        budget = most
    policy = changed_policy(request.thinking, budget, request.sampling.max_tokens or budget)
    return replace(request, thinking=policy)


class Orders:
    """Every order gets one answer, at once or after a few steps."""

    def __init__(self, core: Requests) -> None:
        self._core = core
        self._waiting: list[Order] = []
        self._answers: list[Answer] = []
        self.probes = Probes(core.scheduler, lambda call, result: self._answers.append(Answer(call, result)))
        self.branching = Branching(core)
        self._actions: dict[type[Order], Callable[[Running, Any], Any]] = {
            Pause: self._pause,
            Resume: self._resume,
            Cancel: self._cancel,
            EndThinking: self._end_thinking,
            SetBudget: self._set_budget,
            Inject: self._inject,
            Probe: self._probe,
            Fork: self._fork,
            Rollback: self._rollback,
            Hash: self._hash,
        }

    def give(self, order: Order) -> None:
        """Do it, or keep it for later."""
        try:
            value = self._do(order)
        except NotYet:
            self._waiting.append(order)
        except ThinkfoldError as error:
            self._answers.append(Answer(order.call, error=error))
        else:
            if value is not _LATER:
                self._answers.append(Answer(order.call, value))

    def _do(self, order: Order) -> Any:
        if isinstance(order, Extend):
            return self.branching.extend(order)
        if isinstance(order, Drop):
            return self._core.handles.drop(order.request_id, order.namespace)
        if isinstance(order, Prefill):
            self._core.prefixes.start(order)
            return _LATER
        if isinstance(order, ListPins):
            return self._core.prefixes.pinned(order.owner)
        if isinstance(order, Unpin):
            return self._core.prefixes.drop(order.request_id, order.owner)
        if isinstance(order, Forget):
            return self._forget(order)
        running = self._core.find(order.request_id)
        value = self._actions[type(order)](running, order)
        self._core.touch(running)
        return value

    def retry(self) -> None:
        """Orders that had to wait are tried again."""
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self.give(order)

    def take(self) -> list[Answer]:
        """Answers since the last call."""
        answers, self._answers = self._answers, []
        return answers + self._core.prefixes.take()

    def _forget(self, order: Forget) -> dict[str, int]:
        core, labels, session = self._core, order.labels, order.session
        if not core.prefixes.give_up(order.owner, session):
            raise NotYet
        calls = [each for each in core.running() if session and each.request.is_of(labels, session)]
        for call in calls:
            for branch in call.branches:
                core.end(call, branch, FinishReason.ABORT)
        handles = core.handles.forget(labels, session)
        prefixes, pages = core.prefixes.forget(order.owner, labels, session)
        gone = {"handles": handles, "prefixes": prefixes, "pages": pages}
        return {"calls": len(calls), **gone} if session else gone

    def _pause(self, running: Running, order: Pause) -> None:
        branches = [b for b in running.live(order.choice) if b.status is not BranchStatus.PAUSED]
        if not branches:
            raise ConflictError(f"{order.request_id!r} is paused already")
        self._core.tick()
        behind_trunk = order.choice is None  # then the trunk is paused, too, and they stay behind it
        for branch in branches:
            if branch.status is not BranchStatus.BEHIND_TRUNK or not behind_trunk:
                self._settle(running, branch)
                self._core.scheduler.pause(branch)

    def _resume(self, running: Running, order: Resume) -> None:
        branches = [b for b in running.live(order.choice) if b.status is BranchStatus.PAUSED]
        if not branches:
            raise ConflictError(f"{order.request_id!r} is not paused")
        self._core.tick()
        for branch in reversed(branches):
            self._core.scheduler.resume(branch)

    def _cancel(self, running: Running, order: Cancel) -> None:
        for branch in running.live(order.choice):
            if not order.keep_partial:
                control = running.controls[branch.index]
                control.discard()
                own = running.own_tokens(branch.index, control)
                self._core.discard(running, branch, own - branch.inflight)  # `end` counts that
                running.notes.pop(branch.index, None)
            self._core.end(running, branch, FinishReason.ABORT)

    def _end_thinking(self, running: Running, order: EndThinking) -> None:
        failures: list[ThinkfoldError] = []
        branches = running.live(order.choice)
        for branch in branches:
            try:
                running.controls[branch.index].end_thinking(order.reason)
            except ConflictError as error:
                failures.append(error)
        if len(failures) == len(branches):
            raise failures[0]

    def _set_budget(self, running: Running, order: SetBudget) -> int | None:
        if order.choice is not None:
            raise ConflictError("a budget is one for all choices")
        request = changed_budget(running.request, order.budget)
        branches = running.live(None)
        for branch in branches:
            running.controls[branch.index].set_budget(request.thinking.budget)
        running.request = request
        for branch in running.branches:
            branch.request = running.request
        return request.thinking.budget

    def _inject(self, running: Running, order: Inject) -> int:
        branch = self._one(running, order)
        control = running.controls[branch.index]
        if control.pending:
            raise NotYet
        self._settle(running, branch)
        ids = control.inject(order.token_ids)
        branch.token_ids += ids
        branch.stale_counts = True
        if control.finish_reason is not None:
            self._core.end(running, branch)
        return control.num_output_tokens

    def _probe(self, running: Running, order: Probe) -> object:
        self.probes.start(running, self._one(running, order), order)
        return _LATER

    def _fork(self, running: Running, order: Fork) -> Handle:
        return self.branching.keep(running, self._one(running, order), order.at)

    def _rollback(self, running: Running, order: Rollback) -> int:
        branch = self._one(running, order)
        self.probes.close(running, branch)
        self._settle(running, branch)
        return self.branching.rollback(running, branch, order.at)

    def _hash(self, running: Running, order: Hash) -> str:
        return state_hash(self._one(running, order))

    def _one(self, running: Running, order: Order) -> Branch:
        """The branch that the order is for."""
        branches = running.live(order.choice)
        if len(branches) > 1:
            raise ConflictError(f"{order.request_id!r} has {len(branches)} running choices; name one")
        return branches[0]

    def _settle(self, running: Running, branch: Branch) -> None:
        """Nothing of the branch is in flight after this."""
        self._core.discard(running, branch)
        self._core.scheduler.settle(branch)

    def close(self, running: Running) -> None:
        """The request has ended: what still waits for it will not be done."""
        self.probes.close(running)
        self.withdraw(running.request.request_id)

    def withdraw(self, request_id: str) -> None:
        """Nothing that waits for the request will be done."""
        gone = [order for order in self._waiting if order.request_id == request_id]
        self._waiting = [order for order in self._waiting if order.request_id != request_id]
        self._answers += [Answer(o.call, error=NotFoundError(f"{request_id!r} has ended")) for o in gone]
