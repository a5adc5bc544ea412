"""`thinkfold bench stack`: arms that add up, one loop for all problems, and rows paired with the first arm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinkfold.cli import bench
from thinkfold.cli.evaluation import Question
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.types import CompletionOutput, Costs, RequestOutput, SamplingParams, ThinkingPolicy, VoteParams

stack = bench.load(Path(__file__).parents[2] / "benchmarks" / "stack.py")
ARGS = stack.parse(["--samples", "3", "--clients", "2", "--device", "cpu"])
QUESTION = Question(7, "sums", "?", "4", lambda text: "{4}" in text)


def output(*answers: str, costs: Costs | None = None, error: str | None = None) -> RequestOutput:
    branches = [CompletionOutput(i, text=f"It is \\boxed{{{answer}}}.") for i, answer in enumerate(answers)]
    policy = ThinkingPolicy(True, None, "default")
    return RequestOutput("r", branches, policy, costs or Costs(), finished=True, error=error)


def test_each_arm_has_all_that_the_arms_before_it_have() -> None:
    configs = {arm: stack.config_of(ARGS, arm, 1 << 20) for arm in stack.ARMS}
    asked = ("enable_prefix_caching", "kv_cache_dtype", "fold_policy", "fold_at_answer", "kv_cache_bytes")
    shown = {arm: tuple(getattr(config, name) for name in asked) for arm, config in configs.items()}
    assert shown["none"] == (False, "model", "off", "keep", 1 << 20)
    assert shown["+prefix"] == (True, "model", "off", "keep", 1 << 20)
    assert shown["+fp8"] == (True, "fp8_e4m3", "off", "keep", 1 << 20)
    assert shown["+fold"] == shown["+stop"] == shown["+vote"] == (True, "fp8_e4m3", "pressure", "recycle", 1 << 20)


async def test_how_an_arm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[SamplingParams, Any, Any]] = []

    async def collect(engine: Any, prompt: Any, sampling: SamplingParams, *, control: Any = None, how: Any = None):
        calls.append((sampling, control, how))
        return output(*["4"] * sampling.n, costs=Costs(thinking_tokens=5, probe_tokens=1))

    monkeypatch.setattr(stack, "collect", collect)
    engine = SimpleNamespace(prompts=SimpleNamespace(encode_chat=lambda messages: [1, 2]))
    found = {}
    for arm in stack.ARMS:
        calls.clear()
        found[arm] = await stack.answer(engine, QUESTION, arm, ARGS), list(calls)
    answered, alone = found["none"]
    assert answered.correct and (answered.tokens, answered.probe_tokens) == (18, 3)
    assert [one.n for one, _, _ in alone] == [1, 1, 1] and len({one.seed for one, _, _ in alone}) == 3
    assert [(one.n, control, how) for one, control, how in found["+fold"][1]] == [(3, None, None)]
    ((_, control, how),) = found["+stop"][1]
    assert control.preset == "balanced" and how is None
    ((one, control, how),) = found["+vote"][1]
    assert (one.n, control.preset, how) == (1, "balanced", VoteParams(3))


def test_a_majority_over_all_outputs_and_what_it_took() -> None:
    costs = Costs(thinking_tokens=10, answer_tokens=2, discarded_tokens=3, probe_tokens=4, prompt_tokens=99)
    found = stack.judged(QUESTION, [output("5", costs=costs), output("4"), output("4")], 1.5)
    assert found == stack.Answered(1.5, True, 19, 4)
    assert not stack.judged(QUESTION, [output("5"), output("5"), output("4")], 1.5).correct
    with pytest.raises(ThinkfoldError, match="problem 7: out of luck"):
        stack.judged(QUESTION, [output("4", error="out of luck")], 1.0)


async def test_clients_ask_every_problem_once() -> None:
    running = 0
    most: list[int] = []
    after: list[bool] = []

    async def ask(question: Question) -> Any:
        nonlocal running
        running += 1
        most.append(running)
        await asyncio.sleep(0)
        running -= 1
        after.append(loop.all_begun)
        return stack.Answered(1.0, True, question.index, 0)

    questions = [Question(index, "t", "?", "4", QUESTION.judge) for index in range(5, 12)]
    loop = stack.Loop(ask, questions)
    answers = await loop.run(3)
    assert [one.tokens for one in answers] == list(range(5, 12)) and max(most) == 3
    assert not after[0] and after[-1]


def test_rows_are_paired_with_the_first_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("output_tokens_per_s", "kv_pool_use_mean", "running_mean", "forced_preemptions", "folds")

    async def measure(arm: str, args: Any, size: int) -> Any:
        assert size == 1000 // 16 * 64
        right = arm == "none"
        return [stack.Answered(float(i), right or i > 0, 100 if right else 40, 4) for i in range(4)], dict.fromkeys(
            names, 0.9
        )

    async def page_bytes(args: Any) -> int:
        return 64

    monkeypatch.setattr(stack, "measure", measure)
    monkeypatch.setattr(stack, "page_bytes", page_bytes)
    words = ["--arms", "none", "+vote", "--pool-tokens", "1000", "--threads", "1", "--no-record", "--json"]
    assert stack.main([*words, "--device", "cpu"]) == 0
    none, vote = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (none["case"], vote["case"], vote["bench"]) == ("none", "+vote", "stack")
    found = vote["metrics"]
    assert (found["accuracy"], found["b"], found["tokens"], found["tokens_ratio"]) == (0.75, 1, 40, 0.4)
    assert (found["p99_s"], found["probe_share"], found["kv_pool_use_mean"]) == (3.0, 0.1, 0.9)


@pytest.mark.parametrize("words", [["--samples", "1"], ["-n", "0"], ["--pool-tokens", "0"]])
def test_what_cannot_be_run_is_refused(words: list[str]) -> None:
    with pytest.raises(ParameterError):
        stack.parse(words)
