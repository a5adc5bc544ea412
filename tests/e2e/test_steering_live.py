"""Early stopping of Pebble's real thinking (fp32, CPU)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thinkfold import LLM, SamplingParams, ThinkingParams
from thinkfold.types import ControlParams, RequestOutput, VoteParams, VoteState, parse_control

QUESTION = [{"role": "user", "content": "What is 23 * 47 + 38 * 91 + 12 * 17?"}]
LENGTH = 350  # no rule looks before 256 tokens
SURE = {"early_stop": {"confidence": 0.0}}  # the first probe is enough


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pebble", max_model_len=2048, kv_cache_bytes=64 << 20) as llm:
        yield llm


def ask(llm: LLM, control: ControlParams | None) -> RequestOutput:
    return llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=LENGTH), control=control)[0]


def test_looks_leave_no_trace_and_a_stop_says_which_rule(llm: LLM) -> None:
    plain = ask(llm, None)
    watched = ask(llm, parse_control({**SURE, "shadow": True}))
    stopped = ask(llm, parse_control(SURE))
    assert plain.costs.probe_tokens == 0 < watched.costs.probe_tokens
    assert watched.outputs[0].token_ids == plain.outputs[0].token_ids
    (choice,) = stopped.outputs
    assert choice.thinking_end_reason == "confidence" and "\\boxed{" in choice.text
    assert 256 <= choice.num_thinking_tokens < plain.outputs[0].num_thinking_tokens
    assert stopped.costs.probe_tokens > 0
    assert llm.engine.stats().decisions["confidence", "stopped"] == 1


def test_exact_is_the_full_run(llm: LLM) -> None:
    short = SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    plain = llm.chat(QUESTION, short)[0]
    exact = llm.chat(QUESTION, short, control=ControlParams("exact"))[0]
    assert exact.outputs[0].token_ids == plain.outputs[0].token_ids and exact.costs.probe_tokens == 0


def test_a_vote_of_real_samples(llm: LLM) -> None:
    how = VoteParams(4, mode="all", stop="exact")
    question = [{"role": "user", "content": "What is 7 + 5?"}]
    short, sampling = ThinkingParams(thinking_token_budget=40), SamplingParams(temperature=0.6, seed=1, max_tokens=90)
    (found,) = llm.chat(question, sampling, short, vote=how)
    assert isinstance(found.outcome, VoteState) and found.outcome.started == 4 and found.outcome.running == 0
    assert found.outcome.answer is not None and found.outcome.answer in found.outputs[0].text
    assert found.costs.prompt_tokens < 60 and found.costs.computed_prompt_tokens <= found.costs.prompt_tokens + 4
    assert found.costs.thinking_tokens + found.costs.answer_tokens > 2 * found.outputs[0].num_output_tokens
