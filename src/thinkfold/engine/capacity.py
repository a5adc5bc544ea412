"""What the KV pool keeps back, and what one request can hold of it alone: the bounds that are known beforehand."""

from __future__ import annotations

from bisect import bisect_right

from thinkfold.config import EngineConfig
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import CapacityError
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.fold.estimate import FoldShape
from thinkfold.kv.blocks import ONE_RANK
from thinkfold.kv.shards import Shards
from thinkfold.types import FoldMode, FoldPolicy


def most_output_tokens(prompt_tokens: int, fold: FoldPolicy, model: ModelInfo) -> int:
    """Output tokens that the model's length and the pool allow; with folding the pool holds more than its entries.

    Raises CapacityError with both numbers if there is room for none.
    """
    if prompt_tokens >= model.max_prompt_len:
        raise CapacityError(
            "prompt",
            f"{prompt_tokens} tokens leave no room for an answer: this engine holds {model.max_prompt_len} "
            f"(the smaller of the model's length and the KV pool of {model.num_pages} pages of {model.page_size})",
        )
    room = model.max_model_len - prompt_tokens
    if fold.policy is FoldMode.OFF:
        return min(room, model.kv_capacity - prompt_tokens)

    numbers = fold.numbers.behind(model.window)
    shape = FoldShape.most(numbers)

    def peak(output_tokens: int) -> float:
        return prompt_tokens + shape.entries(numbers, output_tokens)

    return max(1, bisect_right(range(room + 1), model.kv_capacity, key=peak) - 1)


def reserve_pages(budgets: FoldBudgets, config: EngineConfig, num_pages: int, shards: Shards = ONE_RANK) -> int:
    """Pages kept for the summary of one segment, so that a fold succeeds when no page is free."""
    _, numbers = config.fold_numbers
    counts = budgets.counts(numbers.entries, numbers.max_segment_tokens, config.page_size)
    blocks = [-(-count // config.page_size) for count in counts]
    return min(shards.pages(blocks, budgets.page_blocks or len(counts)), num_pages // 4)
