"""What the engine tells of a running request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

from thinkfold.errors import ThinkfoldError
from thinkfold.types.fold import FoldPolicy
from thinkfold.types.limits import Limits
from thinkfold.types.messages import by_position
from thinkfold.types.outcome import Outcome
from thinkfold.types.phases import FinishReason, Phase, ThinkingEndReason
from thinkfold.types.thinking import ThinkingPolicy
from thinkfold.types.until import Handle


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one drawn token on raw logits, with the most likely ones.

    Injected tokens have none. `phase` is None for tokens that print nothing (markers, EOS).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    phase: Phase | None = None


class TokenStats(NamedTuple):
    """Statistics of one sampling row on raw logits (nats; temperature 1, no penalties).

    `confidence` is the negative mean log-prob of the 20 most likely tokens (DeepConf);
    `margin` is log p(top 1) - log p(first end-marker token), NaN where there is no marker.
    """

    logprob: float
    entropy: float
    confidence: float
    margin: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A finished stretch of thinking: `[start, end)` are output token indices."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place between two output tokens: `index` of them stand before it. `transition` is before a word that turns."""

    kind: Literal["sentence", "paragraph", "transition", "segment"]
    index: int


@dataclass(frozen=True, slots=True)
class Fold:
    """What became of one span of thinking, `[start, end)` in output token indices.

    `entries` a KV head (mean over layers and heads) are left of it, `pages_freed` raw pages went
    back to the pool less those taken for the summary. `error` is the gate's estimate, NaN
    without one. A refused fold kept its span raw, or quantised. `quantised`: all its entries are left,
    in fewer bits; a fold of it may follow.
    """

    id: int
    start: int
    end: int
    entries: float
    pages_freed: int
    error: float
    refused: bool = False
    quantised: bool = False


@by_position
@dataclass(slots=True)
class CompletionOutput:
    """New output of one branch since the previous message; counts are cumulative.

    `discarded`: the branch was cancelled and nothing of it is kept, what was told before neither.
    `restart`: it was rolled back, this output starts again from the first token, and of the statistics
    told before only the first `restart` count. `handle` keeps the state at a part's end.
    """

    index: int
    reasoning: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: list[TokenStats] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    phase: Phase = Phase.ANSWER
    num_output_tokens: int = 0
    num_thinking_tokens: int = 0
    num_injected_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    thinking_end_reason: ThinkingEndReason | None = None
    discarded: bool = False
    restart: int | None = None
    handle: Handle | None = None

    def copy_for(self, index: int) -> CompletionOutput:
        """The same news as those of choice `index`."""
        lists = {f.name: list(value) for f in fields(self) if isinstance(value := getattr(self, f.name), list)}
        return replace(self, index=index, **lists)

    def merge(self, later: CompletionOutput) -> None:
        """Append `later` to self."""
        if later.discarded:
            self._clear(0)
        elif later.restart is not None:
            begin = self.num_output_tokens - self.num_injected_tokens - len(self.stats)  # sampled tokens told before
            self._clear(max(0, later.restart - begin))
        self.reasoning += later.reasoning
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.stats += later.stats
        self.segments += later.segments
        self.folds += later.folds
        self.boundaries += later.boundaries
        self.phase = later.phase
        self.num_output_tokens = later.num_output_tokens
        self.num_thinking_tokens = later.num_thinking_tokens
        self.num_injected_tokens = later.num_injected_tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.thinking_end_reason = later.thinking_end_reason
        self.discarded = later.discarded
        self.restart = min((r for r in (self.restart, later.restart) if r is not None), default=None)
        self.handle = later.handle

    def _clear(self, keep: int) -> None:
        """Forget all but the statistics of the first `keep` sampled tokens."""
        self.reasoning = self.text = ""
        self.token_ids, self.segments, self.folds, self.boundaries = [], [], [], []
        self.logprobs, self.stats = self.logprobs[:keep], self.stats[:keep]


@by_position
@dataclass(slots=True)
class Costs:
    """What a request cost so far: tokens, KV memory held and time, over all branches.

    `computed_prompt_tokens` includes what a preemption computes again; `copied_tokens` are output tokens
    of greedy choices that were computed once, for another choice; `injected_tokens` are those of thinking and
    answers that the model did not draw. Times in seconds;
    `kv_byte_seconds` is bytes of KV pages held integrated over time, `kv_peak_entries` the most
    entries held at once (a summary counts with its memory, mean over layers and heads). `probe_tokens`
    were computed on the side, asked for and drawn ones; `paused_s` is no time of any phase. `device_s` is the
    request's part of the device's time: each step is split evenly among the branches that run.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    thinking_tokens: int = 0
    answer_tokens: int = 0
    copied_tokens: int = 0
    injected_tokens: int = 0
    discarded_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    kv_byte_seconds: float = 0.0
    kv_peak_entries: int = 0
    folds: int = 0
    folds_refused: int = 0
    folded_tokens: int = 0
    quantised_tokens: int = 0
    swapped_bytes: int = 0
    probe_tokens: int = 0
    paused_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    thinking_s: float = 0.0
    answer_s: float = 0.0
    device_s: float = 0.0

    def as_probe(self) -> Costs:
        """The same where all tokens were computed on the side."""
        tokens = self.computed_prompt_tokens + self.thinking_tokens + self.answer_tokens
        prompt, output = ("prompt", "cached", "computed_prompt"), ("thinking", "answer", "injected")
        none = dict.fromkeys((f"{name}_tokens" for name in (*prompt, *output)), 0)
        return replace(self, **none, probe_tokens=self.probe_tokens + tokens)


@by_position
@dataclass(slots=True)
class RequestOutput:
    """What `AsyncEngine.generate` yields: the news of all branches since the last one.

    `outcome` is where a decision over several samples stands (`AsyncEngine.decide`). `failure` is the error
    where it is of a kind that clients should know.
    """

    request_id: str
    outputs: list[CompletionOutput]
    policy: ThinkingPolicy
    costs: Costs
    finished: bool = False
    error: str | None = None
    fold: FoldPolicy = field(default_factory=FoldPolicy)
    limits: Limits = field(default_factory=Limits)
    outcome: Outcome | None = None
    failure: ThinkfoldError | None = None

    def merge(self, later: RequestOutput) -> None:
        """Append `later` to self, branch by branch; keeps branches sorted by index."""
        known = {o.index: o for o in self.outputs}
        for output in later.outputs:
            if output.index in known:
                known[output.index].merge(output)
            else:
                self.outputs.append(output)
        self.outputs.sort(key=lambda o: o.index)
        self.policy, self.fold, self.costs = later.policy, later.fold, later.costs
        self.outcome = later.outcome or self.outcome
        self.finished = later.finished
        self.error = later.error or self.error
        self.failure = later.failure or self.failure

    def copied(self, choices: int) -> RequestOutput:
        """The output of one greedy choice as that of `choices` equal ones; what they cost is counted once."""
        if choices == 1:
            return self
        spent = self.costs.thinking_tokens + self.costs.answer_tokens
        return replace(
            self,
            outputs=[output.copy_for(index) for output in self.outputs for index in range(choices)],
            costs=replace(self.costs, copied_tokens=(choices - 1) * spent),
        )
