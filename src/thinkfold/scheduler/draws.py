"""What a branch draws next and where its entries go: the arithmetic of one row. No state."""

from __future__ import annotations

from thinkfold.kv.pages import PageClass
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import BatchRow, SampleRow
from thinkfold.types import Phase


def all_launched(branch: Branch) -> bool:
    """max_tokens is a count: the last token is known to be the last when it is launched."""
    drawn = len(branch.token_ids) + branch.inflight - branch.num_prompt_tokens
    limit = branch.request.sampling.max_tokens
    return branch.inflight > 0 and limit is not None and drawn >= limit


def page_class(branch: Branch) -> PageClass:
    if branch.num_computed_tokens < branch.num_prompt_tokens:
        return PageClass.PROMPT
    return PageClass.THINKING if branch.steering.phase is Phase.THINKING else PageClass.ANSWER


def sample_row(branch: Branch) -> SampleRow:
    sampling = branch.request.sampling
    position = len(branch.token_ids) + branch.inflight
    drawn = position - branch.num_prompt_tokens
    history = None
    if branch.stale_counts and _counts_matter(branch):
        history = (branch.token_ids[: branch.num_prompt_tokens], branch.output_ids)
        branch.stale_counts = False
    return SampleRow(
        slot=branch.slot,
        params=sampling,
        seed=sampling.seed or 0,
        branch=branch.random_stream,
        position=position,
        ban_eos=branch.ban_eos,
        allowed=branch.allowed,
        forced_token=sampling.forced_tokens[drawn] if drawn < len(sampling.forced_tokens) else None,
        history=history,
    )


def batch_row(branch: Branch, start: int, count: int) -> BatchRow:
    """`count` tokens of the branch from logical position `start` on, behind its stored entries."""
    from_slot = start == len(branch.token_ids)
    return BatchRow(
        slot=branch.slot,
        token_ids=[] if from_slot else branch.token_ids[start : start + count],
        from_slot=from_slot,
        position=start,
        kv_start=branch.table.kv_len,
        pages=branch.table.pages,
        keep_queries=branch.folding is not None,
        queries_from=branch.num_prompt_tokens,
    )


def _counts_matter(branch: Branch) -> bool:
    sampling = branch.request.sampling
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )
