"""Prompts that arrive together and begin alike: one branch computes what they share, the others find it. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch

SHARE = 0.5  # of the tokens that a branch would compute, that another must be computing for it to wait
LEAST = 128  # of them: fewer are computed sooner than waited for


def had_better_wait(branch: Branch, running: Iterable[Branch], kv: KVManager) -> bool:
    """Whether a running branch is about to publish so much of this one's prompt that it should start after it.

    It waits for no more than the steps that write what both have, and for nobody who has drawn a token: what such a
    branch could publish is published.
    """
    if not kv.prefixes.enabled:
        return False
    size, visible = kv.page_size, branch.request.prompt.visible_len
    for other in running:
        if len(other.token_ids) > other.num_prompt_tokens or other.request.namespace != branch.request.namespace:
            continue
        limit = min(visible, other.request.prompt.visible_len, len(branch.token_ids) - 1)
        alike = common(branch.token_ids, other.token_ids, limit) // size * size
        found = min(other.cached_tokens, alike)  # both find it
        worth = alike - found >= max(LEAST, SHARE * (len(branch.token_ids) - found))
        if worth and other.table.published * size < alike:
            return True
    return False


def common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first `limit` tokens of both are equal, from the start on."""
    limit = min(limit, len(a), len(b))
    return bisect_left(range(1, limit + 1), x=True, key=lambda end: a[:end] != b[:end])
