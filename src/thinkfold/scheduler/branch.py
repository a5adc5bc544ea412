"""One schedulable branch of a request: its tokens, its progress and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from thinkfold.fold.planner import FoldPlanner
from thinkfold.kv.table import PageTable
from thinkfold.types import EngineRequest, FinishReason, Phase


class Steering(Protocol):
    """What the scheduler asks of a branch's control (see `control.branch.BranchControl`)."""

    @property
    def phase(self) -> Phase: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def segment_ends(self) -> Sequence[int]: ...
    @property
    def answer_start(self) -> int | None: ...
    def injection(self) -> tuple[int, ...]: ...
    def must_wait(self, inflight: int) -> bool: ...
    def ban_eos(self, inflight: int) -> bool: ...
    def allowed(self) -> bytes | None: ...


class BranchStatus(Enum):
    """Where a branch stands with the scheduler."""

    BEHIND_TRUNK = auto()  # waits for the prompt of branch 0 to be computed
    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()  # holds what it has and waits for a word from outside
    SIDE = auto()  # a probe: it runs beside the batch and gives way to everybody
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Branch:
    """One continuation of a request's prompt.

    `token_ids` are the known tokens (prompt and collected output). `num_computed_tokens`
    counts logical tokens whose KV is launched and drives positions; `table.kv_len` counts
    stored entries and drives tables and masks. `inflight` drawn tokens are launched but not
    collected. `epoch` rises when tokens in flight must be dropped.
    """

    request: EngineRequest
    index: int
    order: int  # arrival order; lower is served first
    steering: Steering
    token_ids: list[int]
    table: PageTable = field(default_factory=PageTable)
    folding: FoldPlanner | None = None  # when its thinking is folded; None never folds
    status: BranchStatus = BranchStatus.WAITING
    num_computed_tokens: int = 0
    inflight: int = 0
    epoch: int = 0
    slot: int = -1
    stale_counts: bool = True  # the runner's penalty counts must be rebuilt
    ban_eos: bool = False  # the next draw may not end the response
    allowed: bytes | None = None  # the tokens of the next draw, see SampleRow
    error: Exception | None = None
    stored: bool = False  # the queries that judge its folds wait under its order, it has no slot
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_pages: float = 0.0  # to the host and back
    highest_computed: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    lineage: frozenset[str] = frozenset()  # handles whose state it shares
    stream: int | None = None  # see `random_stream`; None is the choice's own
    children: list[Branch] = field(default_factory=list)  # forked when the prompt is computed
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.table.session = self.request.service.session
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def random_stream(self) -> int:
        """Which of its seed's streams of random numbers the branch draws from."""
        return self.index if self.stream is None else self.stream

    @property
    def num_remaining(self) -> int:
        """Tokens to compute next, the one in flight included."""
        return len(self.token_ids) + self.inflight - self.num_computed_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def advance(self, count: int) -> None:
        """The next `count` tokens are launched."""
        start = self.num_computed_tokens
        self.num_computed_tokens = end = start + count
        self.table.kv_len += count
        if start < self.highest_computed:
            self.recomputed_tokens += min(end, self.highest_computed) - start
        if end > self.highest_computed:
            self.highest_computed = end
        if start < self.num_prompt_tokens:
            self.computed_prompt_tokens += min(end, self.num_prompt_tokens) - start

    def waiting_children(self) -> list[Branch]:
        """Children that still wait for this trunk's prompt."""
        return [c for c in self.children if c.status is BranchStatus.BEHIND_TRUNK]

    def drop_inflight(self) -> None:
        """Tokens in flight will not be used; the KV written for known tokens stays valid."""
        self.epoch += 1
        self.inflight = 0
        self.stale_counts = True
