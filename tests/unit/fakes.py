"""Stand-ins at the two borders that matter: what steers a branch, and what runs a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import BatchRow, MemoryWork, SampleRow, StepPlan, StepResult
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import (
    EngineRequest,
    FinishReason,
    Phase,
    PromptState,
    SamplingParams,
    ThinkingPolicy,
    TokenLogprobs,
    TokenStats,
)

NO_STATS = TokenStats(0.0, 0.0, 0.0, 0.0)


def make_request(request_id="r", prompt=(1, 2, 3), *, visible=None, thinking=None, phase=Phase.ANSWER, **sampling):
    """A request as the core gets it, with everything resolved."""
    sampling = {"max_tokens": 16, "seed": 0, **sampling}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        prompt=PromptState(phase, 0, len(prompt) if visible is None else visible),
        sampling=SamplingParams(**sampling),
        thinking=thinking or ThinkingPolicy(False, 0, "no_thinking_model"),
    )


@dataclass
class FreeRun:
    """Steering that ends a branch after `length` tokens and otherwise lets it run."""

    length: int
    outputs: int = 0
    phase: Phase = Phase.ANSWER
    finish_reason: FinishReason | None = None
    segment_ends: list[int] = field(default_factory=list)
    answer_start: int | None = None

    def injection(self):
        return ()

    def must_wait(self, inflight):
        return self.outputs + inflight >= self.length

    def allowed(self):
        return None

    def ban_eos(self, inflight):
        return False


class TokenFunction:
    """A runner whose KV memory holds token ids: the context of a draw is read back through pages.

    A scheduler that feeds a wrong token, table or position is found out by what is drawn.
    """

    def __init__(self, token_of: Callable[[SampleRow], int]) -> None:
        self.token_of = token_of
        self.last_token: dict[int, int] = {}
        self.launched = 0
        self.contents: dict[tuple[int, int], int | None] = {}
        self.host: dict[tuple[int, int], int | None] = {}
        self.fold_error = 0.0
        self.spans: dict[int, list[int | None]] = {}  # prepared fold: the tokens of its span
        self.summaries: dict[int, list[int]] = {}  # slot: entries by head
        self.replaced: dict[int, list[list[int]]] = {}  # prepared fold: the blocks by head in whose place it goes
        self.page_size = 4
        self.contexts: list[list[int]] = []

    def launch(self, plan: StepPlan) -> StepResult:
        self.launched += 1
        memory = plan.memory
        self._move(memory.swap_out, self.contents, self.host)
        self._fold(memory)
        self._move(memory.copies, self.contents, self.contents)
        self._move(memory.swap_in, self.host, self.contents)
        self.summaries |= {slot: lengths for slot, _, lengths in (*memory.adopted, *memory.summaries)}
        self.spans |= {p.fold_id: self._read(p.pages) for p in memory.prepares}
        self.replaced |= {p.fold_id: p.blocks for p in memory.prepares if p.blocks is not None}
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for row in plan.rows:
            ids = [self.last_token[row.slot]] if row.from_slot else row.token_ids
            for i, token in enumerate(ids):
                page, offset = divmod(row.kv_start + i, self.page_size)
                self.contents[row.pages[page], offset] = token
            length = row.kv_start + len(ids)
            context = [self.contents[row.pages[i // self.page_size], i % self.page_size] for i in range(length)]
            for sample in row.samples:
                self.check(row, sample, context)
                self.contexts.append(context)
                token = sample.forced_token if sample.forced_token is not None else self.draw(sample, context)
                self.last_token[sample.slot] = token
                tokens.append(token)
                wanted = sample.params.logprobs is not None
                logprobs.append(TokenLogprobs(token, -0.5) if wanted else None)
        errors = [(prepare.fold_id, self.fold_error) for prepare in memory.prepares]
        return StepResult(plan.step, tokens, [NO_STATS] * len(tokens), logprobs, errors)

    def _fold(self, memory: MemoryWork) -> None:
        """Commits find their span as it was prepared and the slot's summary as long as they say."""
        for fold_id in memory.dropped:
            del self.spans[fold_id]
            self.replaced.pop(fold_id, None)
        for commit in memory.commits:
            growth = commit.growth
            assert self._read(commit.pages) == self.spans.pop(commit.fold_id), (
                "a span has changed since it was prepared"
            )
            lengths = self.summaries.get(commit.slot) or [0] * len(growth.starts)
            gone = self.replaced.pop(commit.fold_id, None)
            if gone is None:
                assert growth.starts == lengths and commit.table is None, "a fold starts where the slot's summary ends"
                self.summaries[commit.slot] = [a + b for a, b in zip(growth.starts, growth.counts, strict=True)]
                continue
            assert commit.table is not None
            parts = zip(lengths, gone, growth.counts, commit.table[1], strict=True)
            assert all(old - len(blocks) * self.page_size + new == now for old, blocks, new, now in parts)
            self.summaries[commit.slot] = commit.table[1]

    def _read(self, pages: list[int]) -> list[int | None]:
        return [self.contents.get((page, offset)) for page in pages for offset in range(self.page_size)]

    def _move(self, pairs, source, target):
        """Copy whole pages, all read before any is written."""
        read = [[source.get((a, offset)) for offset in range(self.page_size)] for a, _ in pairs]
        for (_, b), tokens in zip(pairs, read, strict=True):
            target |= {(b, offset): token for offset, token in enumerate(tokens)}

    def check(self, row: BatchRow, sample: SampleRow, context: list[int]) -> None:
        assert sample.position == len(context), "the drawn token's position is the number of tokens before it"

    def draw(self, sample: SampleRow, context: list[int]) -> int:
        return self.token_of(sample)

    def collect(self, pending: StepResult) -> StepResult:
        return pending


def run_scheduler(scheduler: Scheduler, runner: TokenFunction, branches: list[Branch], *, depth: int, limit: int):
    """Drive a scheduler to the end of all branches; checks integrity after every step."""
    pending: list[tuple[StepPlan, StepResult]] = []
    for _ in range(limit):
        plan = scheduler.plan()
        if plan is not None:
            assert plan.num_tokens > 0 or plan.memory != MemoryWork(), "a step does something"
            pending.append((plan, runner.launch(plan)))
        scheduler.check_integrity()
        if pending and (plan is None or len(pending) > depth):
            plan, result = pending.pop(0)
            for fold_id, error in result.fold_errors:
                scheduler.folds.judge(fold_id, error)
            for (branch, wanted), token in zip(scheduler.collect(plan.step), result.token_ids, strict=True):
                if not wanted:
                    continue
                branch.token_ids.append(token)
                branch.steering.outputs += 1
                if branch.steering.outputs >= branch.steering.length:
                    scheduler.finish(branch)
        elif plan is None:
            return
        scheduler.check_integrity()
    raise AssertionError(f"not finished after {limit} steps")
