"""One accepted request inside the core: its branches, their controls, its bill and its news."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.control.parts import PartControl
from thinkfold.engine.costs import CostMeter
from thinkfold.errors import NotFoundError
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.types import (
    CompletionOutput,
    Costs,
    EngineRequest,
    FinishReason,
    Fold,
    Handle,
    RequestOutput,
    TokenLogprobs,
    TokenStats,
)

_IDLE = (BranchStatus.PAUSED, BranchStatus.FINISHED, BranchStatus.BEHIND_TRUNK)


@dataclass(slots=True)
class Running:
    """`folds` and `notes` are news by branch; `told` are branches whose last output has been handed out."""

    request: EngineRequest
    branches: list[Branch]
    controls: list[PartControl]
    meter: CostMeter
    before: list[tuple[int, int, int]]  # thinking, output and injected tokens that each branch brought with it
    notes: dict[int, tuple[list[TokenLogprobs], list[TokenStats]]] = field(default_factory=dict)
    folds: dict[int, list[Fold]] = field(default_factory=dict)
    handles: dict[int, Handle] = field(default_factory=dict)  # of parts that have ended, by branch
    told: set[int] = field(default_factory=set)
    begun: bool = False  # a token has been drawn for it
    started: float = 0.0  # when the core took it in
    error: str | None = None

    def bill(self) -> Costs:
        """Its costs with the tokens until now; what was cancelled without its text is not among them."""
        thinking = output = injected = 0
        for control, before in zip(self.controls, self.before, strict=True):
            if not control.discarded:
                thinking += control.num_thinking_tokens - before[0]
                output += control.num_output_tokens - before[1]
                injected += control.num_injected_tokens - before[2]
        return self.meter.count_tokens(self.branches, thinking, output, injected)

    @property
    def finished(self) -> bool:
        return len(self.told) == len(self.branches)

    @property
    def idle(self) -> bool:
        """Whether nothing runs until somebody resumes it or what it waits for is told."""
        return all(branch.status in _IDLE for branch in self.branches)

    def own_tokens(self, index: int, control: PartControl) -> int:
        """Output tokens of a branch that it did not bring with it."""
        return control.num_output_tokens - self.before[index][1]

    def bring_less(self, index: int, control: PartControl) -> None:
        """A branch went back to `control`, maybe to before its own start: what it writes from there on is its own."""
        thinking, output, injected = self.before[index]
        self.before[index] = (
            min(thinking, control.num_thinking_tokens),
            min(output, control.num_output_tokens),
            min(injected, control.num_injected_tokens),
        )

    def forget_notes(self, index: int, sampled: int, control: PartControl) -> None:
        """A branch with `sampled` tokens was rolled back to `control`: statistics beyond it, told or not, are void."""
        logprobs, stats = self.notes.get(index, ([], []))
        told = sampled - len(stats)
        keep = max(0, control.told(told) - told)
        del logprobs[keep:], stats[keep:]

    def live(self, choice: int | None) -> list[Branch]:
        """The branch of a choice, or all, that has not ended. Raises NotFoundError if there is none."""
        branches = [b for b in self.branches if b.status is not BranchStatus.FINISHED and choice in (None, b.index)]
        if not branches:
            what = "any more" if choice is None else f"as a running choice {choice}"
            raise NotFoundError(f"{self.request.request_id!r} is not there {what}")
        return branches


def refusal(request: EngineRequest, error: Exception) -> RequestOutput:
    """The only output of a request that could not be prepared."""
    output = CompletionOutput(index=0, finish_reason=FinishReason.ERROR)
    meter = CostMeter(len(request.prompt_token_ids), 0, 0)
    message = f"{type(error).__name__}: {error}"
    return RequestOutput(request.request_id, [output], request.thinking, meter.costs, finished=True, error=message)
