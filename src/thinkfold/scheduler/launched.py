"""What the scheduler remembers of a step between its launch and its end. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import FoldCommit


@dataclass(slots=True)
class Launched:
    """Whose rows and draws a launched step holds, in the order of its plan."""

    step: int
    rows: list[tuple[Branch, int]] = field(default_factory=list)  # (branch, tokens written up to)
    draws: list[tuple[Branch, int]] = field(default_factory=list)  # (branch, epoch)
    commits: list[FoldCommit] = field(default_factory=list)
