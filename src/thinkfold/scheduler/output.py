"""What the scheduler hands to the runner for one step, and what comes back. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.kv.summary import SummaryGrowth
from thinkfold.types import SamplingParams, TokenLogprobs, TokenStats


@dataclass(slots=True)
class SampleRow:
    """One token to draw from the logits of a row's last token.

    `slot` is the branch's place in the runner's per-branch state (0 <= slot < max_num_seqs).
    `position` is the logical position of the drawn token; with (seed, branch) it fixes the
    random number. `history` rebuilds the slot's penalty counts (prompt ids, output ids) when
    the runner's own incremental counts are stale; None keeps them. `allowed` has a bit for each
    token id that may be drawn (little-endian, whole 64-bit words); None allows all.
    """

    slot: int
    params: SamplingParams
    seed: int
    branch: int
    position: int
    ban_eos: bool = False
    forced_token: int | None = None
    allowed: bytes | None = None
    history: tuple[list[int], list[int]] | None = None


@dataclass(slots=True)
class BatchRow:
    """A run of tokens of one branch: prefill chunk, decode token, injected tokens alike.

    `token_ids` are the known input ids; when `from_slot` is set, the row is one token, the
    one drawn by the previous step for that slot, still on the device. `position` is logical
    (RoPE), `kv_start` the stored entries before the row; they may differ. With `keep_queries`
    some of its queries are kept to judge folds, none before logical position `queries_from`
    (the prompt's end: what the prefix tree gives was never computed here).
    """

    slot: int
    token_ids: list[int]
    from_slot: bool
    position: int
    kv_start: int
    pages: list[int]
    samples: list[SampleRow] = field(default_factory=list)
    keep_queries: bool = False
    queries_from: int = 0
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = 1 if self.from_slot else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class FoldPrepare:
    """Judge a span of raw KV and choose what would stay; nothing changes yet.

    The span is `pages` (whole raw pages in order, `len(pages) * page_size` tokens) that end
    before logical position `end`; the slot's query store holds what came after it. `ends` are the
    ends of its segments in tokens from its start, the last up to a page behind it: a segment's
    result stands before its end. The choice waits on the device under `fold_id` until it is
    committed or dropped. `whole`: everything stays, in fewer bits. A span that was kept so is read
    from its `blocks` by head instead of pages.
    """

    fold_id: int
    slot: int
    pages: list[int]
    end: int
    ends: tuple[int, ...]
    selector: str
    entries: int
    whole: bool = False
    blocks: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class FoldCommit:
    """Write a prepared summary behind the slot's earlier ones; the span's pages are dropped after it.

    `pages` are the span's raw pages of now (a swap may have moved it since it was prepared),
    `growth` says which head blocks hold the summary (see `kv.summary`); its counts are the
    budget of the prepared selector. Where it replaces what was kept whole, `table` are the slot's
    whole tables after it: blocks and entries by head.
    """

    fold_id: int
    slot: int
    pages: list[int]
    growth: SummaryGrowth
    table: tuple[list[list[int]], list[int]] | None = None


@dataclass(slots=True)
class MemoryWork:
    """What is done to KV memory before a step's forward, in this order.

    `swap_out` `(device page, host page)`, and `blocks_out` `(device block, host block)`, leave;
    prepared folds `dropped`; `commits` write summaries; `copies` are whole-page copies (source,
    target); `swap_in` and `blocks_in` (host, device) return; `summaries` `(slot, blocks by head,
    entries by head)` set a slot's whole summary tables (after admission of a branch that has
    them already, or empty for a slot that is used anew) and empty its query store; `adopted`, of the
    same kind, only set tables, to what another branch has written; `forks` `(source slot, target
    slot)` copy a query store; `prepares` come last.

    A query store leaves with its branch: `queries_out` `(slot, key)` saves it first of all under
    a key that the scheduler chooses, `queries_in` `(key, slot)` brings it back after `summaries`;
    `queries_kept` `(slot, key)` saves it and leaves the slot as it is, `queries_shared` `(key, key)` gives what is
    saved a second name, and `queries_dropped` are keys whose branch ended while it was away.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_out: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    commits: list[FoldCommit] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_in: list[tuple[int, int]] = field(default_factory=list)
    adopted: list[tuple[int, list[list[int]], list[int]]] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)
    summaries: list[tuple[int, list[list[int]], list[int]]] = field(default_factory=list)
    prepares: list[FoldPrepare] = field(default_factory=list)
    queries_out: list[tuple[int, int]] = field(default_factory=list)
    queries_in: list[tuple[int, int]] = field(default_factory=list)
    queries_dropped: list[int] = field(default_factory=list)
    queries_kept: list[tuple[int, int]] = field(default_factory=list)
    queries_shared: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """One forward of the batch and the memory work before it. `rows` may be empty, then only that is done."""

    step: int
    rows: list[BatchRow]
    memory: MemoryWork = field(default_factory=MemoryWork)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """Drawn tokens in the order of `row.samples` over all rows of the plan.

    A token id of -1 marks a row whose logits were not finite: that branch fails, not the batch.
    `fold_errors` `(fold_id, estimated error)` belong to the step's prepared folds, `fold_faults` `(fold_id, what was
    raised)` to folds that could be neither prepared nor written: those branches cannot go on.
    """

    step: int
    token_ids: list[int]
    stats: list[TokenStats]
    logprobs: list[TokenLogprobs | None]
    fold_errors: list[tuple[int, float]] = field(default_factory=list)
    fold_faults: list[tuple[int, str]] = field(default_factory=list)
