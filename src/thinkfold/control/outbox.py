"""News of one branch that nobody has taken yet. Knows nothing about rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.types import Boundary, CompletionOutput, FinishReason, Phase, Segment, ThinkingEndReason


@dataclass(slots=True)
class Outbox:
    """Collects deltas between two calls of `take`."""

    index: int
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    changed: bool = False
    discarded: bool = False
    restart: int | None = None

    def discard(self) -> None:
        """Nothing of the branch is kept."""
        self.reasoning, self.text, self.token_ids, self.segments = [], [], [], []
        self.changed = self.discarded = True

    def write(self, phase: Phase, text: str) -> None:
        """Add printable text."""
        if text:
            (self.reasoning if phase is Phase.THINKING else self.text).append(text)
            self.changed = True

    def add_token(self, token_id: int) -> None:
        """Add one output token."""
        self.token_ids.append(token_id)
        self.changed = True

    def take(
        self,
        *,
        phase: Phase,
        num_output_tokens: int,
        num_thinking_tokens: int,
        num_injected_tokens: int,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
        thinking_end_reason: ThinkingEndReason | None,
    ) -> CompletionOutput:
        """Hand out everything collected."""
        output = CompletionOutput(
            index=self.index,
            reasoning="".join(self.reasoning),
            text="".join(self.text),
            token_ids=self.token_ids,
            segments=self.segments,
            boundaries=self.boundaries,
            phase=phase,
            num_output_tokens=num_output_tokens,
            num_thinking_tokens=num_thinking_tokens,
            num_injected_tokens=num_injected_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            thinking_end_reason=thinking_end_reason,
            discarded=self.discarded,
            restart=self.restart,
        )
        self.reasoning, self.text, self.token_ids, self.segments, self.changed = [], [], [], [], False
        self.boundaries, self.restart = [], None
        return output
