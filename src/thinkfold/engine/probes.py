"""Probes of running requests: side rows in the batch, and the answers that they bring. Leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from thinkfold.control.side import SideControl
from thinkfold.engine.commands import Probe
from thinkfold.engine.running import Running
from thinkfold.errors import ConflictError
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import StepResult
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import ProbeResult, SamplingParams

Reply = Callable[[int, ProbeResult], None]


@dataclass(slots=True)
class _Asked:
    call: int
    running: Running
    control: SideControl
    shared: int  # tokens that the probe did not compute
    after: int  # output tokens of the branch


class Probes:
    """Starts probes and follows their tokens. `reply(call, result)` is called once for each."""

    def __init__(self, scheduler: Scheduler, reply: Reply) -> None:
        self._scheduler = scheduler
        self._reply = reply
        self._asked: dict[int, _Asked] = {}  # by the side branch's id
        self.tokens = 0

    def start(self, running: Running, branch: Branch, order: Probe) -> None:
        """Fork a side branch off what is known of `branch`. Raises ConflictError if that has no KV on the device."""
        if not branch.num_computed_tokens or branch.table.swapped:
            raise ConflictError(f"{order.request_id!r} has no state to ask yet, or it is not on the device")
        request, control = running.request, running.controls[branch.index]
        steering = SideControl(control.vocabulary, control.phase, order.n, order.stop)
        known = len(branch.token_ids) + len(order.token_ids)
        if known + order.n > order.max_len:
            raise ConflictError(f"{known} tokens and {order.n} more are longer than the model's {order.max_len}")
        sampling = SamplingParams(
            temperature=0.0,
            logit_bias=request.sampling.logit_bias,
            logprobs=order.logprobs,
            max_tokens=known + order.n - len(request.prompt_token_ids),
            seed=0,
        )
        side = Branch(
            replace(request, sampling=sampling), branch.index, -1, steering, [*branch.token_ids, *order.token_ids]
        )
        self._scheduler.fork_side(branch, side, redo=not order.token_ids)
        self._asked[id(side)] = _Asked(order.call, running, steering, side.highest_computed, len(branch.output_ids))

    def accept(self, side: Branch, result: StepResult, index: int) -> None:
        """One drawn token of a side branch."""
        token, asked = result.token_ids[index], self._asked[id(side)]
        if token < 0:
            self._scheduler.sides.drop_one(side, "the model's logits are not finite")
            self.sweep()
            return
        side.token_ids.append(token)
        asked.control.accept(token, result.stats[index], result.logprobs[index])
        if asked.control.finish_reason is not None:
            self._scheduler.sides.end(side)
            self._answer(side, None)

    def sweep(self) -> None:
        """Answer for those that were dropped."""
        dropped, self._scheduler.sides.dropped = self._scheduler.sides.dropped, []
        for side, why in dropped:
            self._answer(side, why)

    def close(self, running: Running, branch: Branch | None = None) -> None:
        """The request, or one branch of it, has ended or gone back: nobody asks any more."""
        for side in self._scheduler.sides:
            if self._asked[id(side)].running is running and branch in (None, running.branches[side.index]):
                self._scheduler.sides.drop_one(side, "the response has ended")
        self.sweep()

    def _answer(self, side: Branch, dropped: str | None) -> None:
        asked = self._asked.pop(id(side))
        computed = side.highest_computed - asked.shared
        self.tokens += computed
        asked.running.meter.costs.probe_tokens += computed
        result = asked.control.result(computed)
        result.after, result.dropped = asked.after, dropped
        self._reply(asked.call, result)
