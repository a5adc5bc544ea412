"""What came of a question on the side."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.types.output import TokenLogprobs, TokenStats
from thinkfold.types.phases import FinishReason


@dataclass(slots=True)
class ProbeResult:
    """The tokens that the model would write next, `text` without a stop string; one entry a token in the lists.

    `dropped` says why a probe was given up before its end, else it is None: a batch or a pool that is
    full has no place for it. `computed_tokens` went through the model, those asked with included. It was
    asked behind `after` output tokens of the response.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stats: list[TokenStats] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    computed_tokens: int = 0
    after: int = 0
    dropped: str | None = None
