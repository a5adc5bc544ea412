"""What must be true of the scheduler's lists between two calls. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from thinkfold.scheduler.branch import Branch, BranchStatus


def check_lists(running: Iterable[Branch], waiting: Iterable[Branch], parked: Iterable[Branch]) -> None:
    """Raise AssertionError unless every branch is what its list says, and knows what it holds."""
    for branch in running:
        assert branch.status is BranchStatus.RUNNING, "a running branch says it is not"
        assert branch.slot >= 0, "a running branch has no slot"
        folded = branch.folding.folded_tokens if branch.folding else 0
        assert branch.table.kv_len + folded == branch.num_computed_tokens, "entries and tokens disagree"
        assert branch.num_remaining >= 0, "more computed than known"
    for branch in waiting:
        assert branch.status is BranchStatus.WAITING, "a waiting branch says it is not"
        assert branch.num_computed_tokens or not branch.table.pages, "a waiting branch holds pages"
    for branch in parked:
        assert branch.status is BranchStatus.PAUSED and branch.slot < 0, "a parked branch says it is not"
