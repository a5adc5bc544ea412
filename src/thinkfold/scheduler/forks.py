"""How one branch starts from another one's state. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch


def share(kv: KVManager, source: Branch, target: Branch, position: int, *, redo: bool) -> None:
    """Let the fresh `target` hold what `source` holds of its first `position` tokens, and compute the rest.

    `redo`: the last of them is computed again, since its logits are wanted; behind a fold that took it, it is asked
    once more on top of its summary instead. Without KV on the device `target` computes all.
    Raises PositionError where folding has left no state of that position.
    """
    planner = source.folding
    lengths = None if planner is None else planner.cut(position)
    shared = min(source.num_computed_tokens, position)
    if redo and shared == position and (planner is None or planner.is_raw(position - 1)):
        shared -= 1
    if shared <= 0 or source.table.swapped:
        return
    folded = 0 if planner is None else planner.tokens_folded_before(shared)
    kv.fork(source.table, target.table, shared - folded, lengths)
    target.num_computed_tokens = target.highest_computed = target.cached_tokens = shared


def counted_again(branches: Sequence[Branch]) -> int:
    """Pages that a sum over siblings counts more than once. Without their trunk, one fork pays for them."""
    tables = [b.table for b in branches if b.table.pages]
    shared = [t.shared for t in tables]
    return sum(shared) - (max(shared) if shared and all(shared) else 0)
