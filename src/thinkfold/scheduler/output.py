"""What the scheduler hands to the runner for one step, and what comes back. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.types import SamplingParams, TokenLogprobs, TokenStats


@dataclass(slots=True)
class SampleRow:
    """One token to draw from the logits of a row's last token.

    `slot` is the branch's place in the runner's per-branch state (0 <= slot < max_num_seqs).
    `position` is the logical position of the drawn token; with (seed, branch) it fixes the
    random number. `history` rebuilds the slot's penalty counts (prompt ids, output ids) when
    the runner's own incremental counts are stale; None keeps them.
    """

    slot: int
    params: SamplingParams
    seed: int
    branch: int
    position: int
    ban_eos: bool = False
    forced_token: int | None = None
    history: tuple[list[int], list[int]] | None = None


@dataclass(slots=True)
class BatchRow:
    """A run of tokens of one branch: prefill chunk, decode token, injected tokens alike.

    `token_ids` are the known input ids; when `from_slot` is set, the row is one token, the
    one drawn by the previous step for that slot, still on the device. `position` is logical
    (RoPE), `kv_start` the stored entries before the row; they may differ.
    """

    slot: int
    token_ids: list[int]
    from_slot: bool
    position: int
    kv_start: int
    pages: list[int]
    samples: list[SampleRow] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return 1 if self.from_slot else len(self.token_ids)


@dataclass(slots=True)
class StepPlan:
    """One forward of the batch. `copies` are whole-page copies (source, target) done first."""

    step: int
    rows: list[BatchRow]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """Drawn tokens in the order of `row.samples` over all rows of the plan.

    A token id of -1 marks a row whose logits were not finite: that branch fails, not the batch.
    """

    step: int
    token_ids: list[int]
    stats: list[TokenStats]
    logprobs: list[TokenLogprobs | None]
