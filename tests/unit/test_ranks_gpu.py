"""Two GPUs through NCCL, with the compiled model and CUDA graphs: the tokens of one, folded."""

from __future__ import annotations

import pytest
import torch

from thinkfold import LLM, SamplingParams, ThinkingParams
from thinkfold.types import FoldParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
QUESTIONS = [f"What is {a} * {a + 3} + {a}?" for a in (12, 17, 23)]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled, graphs"])
def test_two_gpus_draw_the_tokens_of_one(eager: bool) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=400, logprobs=0)
    options = {"dtype": "float32", "device": "cuda", "enforce_eager": eager, "max_num_seqs": 4}
    found = []
    for ranks in (1, 2):
        with LLM("pebble", tensor_parallel_size=ranks, kv_cache_bytes=(64 << 20) // ranks, **options) as llm:
            chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
            outputs = llm.chat(chats, sampling, ThinkingParams(), fold=FoldParams(policy="eager"))
            assert all(output.error is None for output in outputs)
            found.append([output.outputs[0] for output in outputs])
    for one, two in zip(*found, strict=True):
        # Sums have another order on two cards: from a near tie on, texts may part.
        assert two.token_ids[:64] == one.token_ids[:64]
        for a, b in zip(one.logprobs[:64], two.logprobs[:64], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=0.05)
    assert sum(len(choice.folds) for choice in found[1]) > 0
