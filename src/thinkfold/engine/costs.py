"""The three costs of a request: tokens, KV memory held, time."""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.forks import counted_again
from thinkfold.types import Costs, Fold, Phase


class CostMeter:
    """Adds up one request's costs step by step over all its branches."""

    def __init__(self, prompt_tokens: int, page_size: int, page_bytes: int) -> None:
        self.costs = Costs(prompt_tokens=prompt_tokens)
        self._page_size = page_size
        self._page_bytes = page_bytes

    def tick(self, branches: Sequence[Branch], seconds: float, each: float = 0.0) -> None:
        """`seconds` have passed; charge them to what the request is doing now, and `each` of a running branch's device.

        Queue until a branch has run, prefill until the first token, thinking while any
        branch thinks, answer after that; paused while all are. Pages shared by a fork are charged once.
        """
        costs = self.costs
        if branches and not branches[0].highest_computed and _wait(branches):
            costs.queue_s += seconds
            return
        pages = raw = running = 0
        summaries = 0.0
        paused, queued, prefilling, thinking = bool(branches), True, True, False
        for branch in branches:  # one loop: this runs for every request in every step
            table = branch.table
            pages += len(table.pages)
            if not table.swapped:
                raw += table.kv_len
                summaries += table.summary.mean_entries
            paused &= branch.status is BranchStatus.PAUSED
            queued &= branch.highest_computed == 0
            prefilling &= len(branch.token_ids) <= branch.num_prompt_tokens
            running += branch.status is BranchStatus.RUNNING
            thinking |= branch.steering.phase is Phase.THINKING
        again = counted_again(branches) if len(branches) > 1 else 0
        held = pages - again + summaries / max(1, self._page_size)
        costs.kv_byte_seconds += held * self._page_bytes * seconds
        costs.kv_peak_entries = max(costs.kv_peak_entries, round(raw - again * self._page_size + summaries))
        costs.device_s += each * running
        if paused:
            costs.paused_s += seconds
        elif queued:
            costs.queue_s += seconds
        elif prefilling:
            costs.prefill_s += seconds
        elif thinking:
            costs.thinking_s += seconds
        else:
            costs.answer_s += seconds

    def count_fold(self, fold: Fold) -> None:
        """A span of thinking was folded or quantised, or that was refused."""
        if fold.refused:
            self.costs.folds_refused += 1
        elif fold.quantised:
            self.costs.quantised_tokens += fold.end - fold.start
        else:
            self.costs.folds += 1
            self.costs.folded_tokens += fold.end - fold.start

    def count_tokens(self, branches: Sequence[Branch], thinking: int, output: int, injected: int) -> Costs:
        """Bring the token counts up to date and return the costs."""
        costs = self.costs
        trunk = branches[0]
        costs.cached_tokens = trunk.cached_tokens
        costs.thinking_tokens = thinking
        costs.answer_tokens = output - thinking
        costs.injected_tokens = injected
        costs.recomputed_tokens = costs.preemptions = costs.computed_prompt_tokens = 0
        swapped = 0.0
        for branch in branches:
            costs.recomputed_tokens += branch.recomputed_tokens
            costs.preemptions += branch.preemptions
            costs.computed_prompt_tokens += branch.computed_prompt_tokens
            swapped += branch.swapped_pages
        costs.swapped_bytes = round(swapped * self._page_bytes)
        return costs


def _wait(branches: Sequence[Branch]) -> bool:
    """Whether all of them wait for their first step: then they hold nothing."""
    return all(b.highest_computed == 0 and b.status is not BranchStatus.PAUSED for b in branches)
