"""What a core knows of the device side: a runner of steps, and other ranks that it may have."""

from __future__ import annotations

from typing import Any, Protocol

from thinkfold.scheduler.output import StepPlan, StepResult


class Runner(Protocol):
    """The device side of a step (see `runner.model_runner.ModelRunner`)."""

    def launch(self, plan: StepPlan) -> Any: ...
    def collect(self, pending: Any) -> StepResult: ...


class OtherRanks(Protocol):
    """What a model is split over beside this process (see `runner.ranks.RankedRunner`).

    `check` raises EngineDeadError where one is lost, `close` ends them all.
    """

    def check(self) -> None: ...
    def close(self) -> None: ...
