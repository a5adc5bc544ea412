"""What a request says about its agent: the session it belongs to and the plan step it asks about."""

from __future__ import annotations

from thinkfold.errors import ParameterError
from thinkfold.server.body import StrictModel
from thinkfold.types import SamplingParams, SessionParams

MAX_STEP_CHARS = 16_384


class SessionFields(StrictModel):
    """`total_budget` thinking tokens are for all calls of a session; later calls may leave it out."""

    id: str
    total_budget: int | None = None

    def params(self) -> SessionParams:
        """Raises ParameterError."""
        return SessionParams(self.id, self.total_budget)


class StepCacheFields(StrictModel):
    """`step` is the plan step that the answer is kept for; `bypass` computes it anew and keeps the new answer."""

    step: str
    bypass: bool | None = None

    def check(self, sampling: SamplingParams, prompts: int) -> None:
        """Raise ParameterError for a step, or a request, that no answer can be kept for."""
        if not self.step.strip() or len(self.step) > MAX_STEP_CHARS:
            raise ParameterError("thinkfold.step_cache.step", f"must have 1 to {MAX_STEP_CHARS} characters")
        if sampling.n != 1 or prompts != 1:
            raise ParameterError("thinkfold.step_cache", "keeps one answer: it needs n: 1 and one prompt")
        if sampling.logprobs is not None:
            raise ParameterError("thinkfold.step_cache", "keeps no log-probabilities")
