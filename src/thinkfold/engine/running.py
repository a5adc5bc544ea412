"""One accepted request inside the core: its branches, their controls, its bill and its news."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.control.branch import BranchControl
from thinkfold.engine.costs import CostMeter
from thinkfold.errors import NotFoundError
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.types import EngineRequest, Fold, TokenLogprobs, TokenStats

_IDLE = (BranchStatus.PAUSED, BranchStatus.FINISHED, BranchStatus.BEHIND_TRUNK)


@dataclass(slots=True)
class Running:
    """`folds` and `notes` are news by branch; `told` are branches whose last output has been handed out."""

    request: EngineRequest
    branches: list[Branch]
    controls: list[BranchControl]
    meter: CostMeter
    notes: dict[int, tuple[list[TokenLogprobs], list[TokenStats]]] = field(default_factory=dict)
    folds: dict[int, list[Fold]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    begun: bool = False  # a token has been drawn for it
    error: str | None = None

    @property
    def finished(self) -> bool:
        return len(self.told) == len(self.branches)

    @property
    def idle(self) -> bool:
        """Whether nothing runs until somebody resumes it or what it waits for is told."""
        return all(branch.status in _IDLE for branch in self.branches)

    def live(self, choice: int | None) -> list[Branch]:
        """The branch of a choice, or all, that has not ended. Raises NotFoundError if there is none."""
        branches = [b for b in self.branches if b.status is not BranchStatus.FINISHED and choice in (None, b.index)]
        if not branches:
            what = "any more" if choice is None else f"as a running choice {choice}"
            raise NotFoundError(f"{self.request.request_id!r} is not there {what}")
        return branches
