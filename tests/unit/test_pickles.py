"""Values on the way to a client are pickled as constructor arguments, and come out as they went in."""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import replace

from thinkfold.types import CompletionOutput, Costs, FinishReason, Phase, RequestOutput, ThinkingPolicy, TokenStats
from thinkfold.types.fold import FoldPolicy


def output() -> RequestOutput:
    choice = CompletionOutput(
        index=1,
        reasoning="a",
        token_ids=[1, 2],
        stats=[TokenStats(-0.5, 1.0, 2.0, 3.0)],
        phase=Phase.THINKING,
        finish_reason=FinishReason.LENGTH,
    )
    costs = Costs(prompt_tokens=3, kv_byte_seconds=0.5, answer_s=0.25)
    return RequestOutput("r", [choice], ThinkingPolicy(True, 7, "default"), costs, fold=FoldPolicy(entries=3))


def test_outputs_survive_a_pickle() -> None:
    told = output()
    assert pickle.loads(pickle.dumps(told)) == told
    assert type(pickle.loads(pickle.dumps(told)).outputs[0].stats[0]) is TokenStats


def test_a_copy_goes_its_own_way() -> None:
    costs = output().costs
    other = copy(costs)
    costs.answer_s = 9.0
    assert other == replace(costs, answer_s=0.25)
