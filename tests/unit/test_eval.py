"""`thinkfold eval` over a fake engine: what is asked, judged, counted, printed and kept."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinkfold.cli import eval as command
from thinkfold.cli import evaluation
from thinkfold.engine import async_engine
from thinkfold.errors import ParameterError
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    FinishReason,
    FoldParams,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingParams,
    ThinkingPolicy,
)

POLICY = ThinkingPolicy(enabled=True, budget=None, source="thinking_token_budget")


class FakeEngine:
    """Answers with the texts of a table, one a branch, in two deltas; counts how many requests run at once."""

    def __init__(
        self,
        answers: dict[str, list[str]],
        errors: dict[str, str] | None = None,
        folded: dict[str, list[str]] | None = None,
    ) -> None:
        self.answers = answers
        self.answers_folded = folded or answers
        self.folds: list[FoldParams | None] = []
        self.costs = Costs()
        self.errors = errors or {}
        self.seeds: dict[str, int | None] = {}
        self.running = self.most = 0
        self.stopped = False
        self.prompts = SimpleNamespace(encode_chat=lambda messages: messages[0]["content"])

    async def generate(
        self,
        prompt: Any,
        sampling: SamplingParams,
        thinking: ThinkingParams,
        fold: FoldParams | None = None,
        control: ControlParams | None = None,
        service: Service | None = None,
    ) -> AsyncIterator[RequestOutput]:
        assert control is None and service is None
        self.seeds[prompt] = sampling.seed
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.folds.append(fold)
        eager = fold is not None and fold.policy == "eager"
        texts = (self.answers_folded if eager else self.answers)[prompt]
        self.costs = Costs(kv_peak_entries=25 if eager else 100, folds=2 if eager else 0)
        yield self._output(prompt, [CompletionOutput(i, text=t[:3]) for i, t in enumerate(texts)])
        final = [
            CompletionOutput(
                i, text=t[3:], num_output_tokens=10, num_thinking_tokens=4, finish_reason=FinishReason.STOP
            )
            for i, t in enumerate(texts)
        ]
        self.running -= 1
        yield self._output(prompt, final, finished=True)

    def _output(self, prompt: str, outputs: list[CompletionOutput], finished: bool = False) -> RequestOutput:
        error = self.errors.get(prompt) if finished else None
        return RequestOutput("r", outputs, POLICY, self.costs, finished=finished, error=error)

    async def stop(self) -> None:
        self.stopped = True


def write_questions(path: Path, *pairs: tuple[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))
    return path


def evaluate(engine: FakeEngine, path: Path, **sampling: Any) -> list[evaluation.Result]:
    questions = evaluation.file_questions(path, None, 0)
    work = evaluation.evaluate(
        engine,  # type: ignore[arg-type]
        questions,
        SamplingParams(**sampling),
        ThinkingParams(),
        in_flight=2,
        on_result=lambda result: None,
    )
    return asyncio.run(work)[0]


def test_results_come_in_order_and_few_requests_run_at_once(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", *((f"q{i}", i) for i in range(6)))
    engine = FakeEngine({f"q{i}": [f"It is \\boxed{{{i}}}."] for i in range(6)})
    results = evaluate(engine, path, seed=100)
    assert [r.index for r in results] == list(range(6))
    assert all(r.accuracy == 1.0 for r in results)
    assert engine.most == 2
    assert engine.seeds == {f"q{i}": 100 + i for i in range(6)}


def test_samples_give_pass_at_1_and_majority(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", ("a", "1"), ("b", "2"))
    engine = FakeEngine({"a": ["\\boxed{1}", "\\boxed{1.0}", "\\boxed{9}"], "b": ["7", "2", "nothing"]})
    measured = evaluation.metrics(evaluate(engine, path, n=3, temperature=0.7), seconds=2.0)
    assert measured["accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert measured["maj_at_k"] == 0.5
    assert measured["samples"] == 3
    assert measured["n"] == 2
    assert measured["output_tokens_per_s"] == 30.0
    assert measured["thinking_tokens_mean"] == 4.0
    assert measured["kv_peak_entries_mean"] == 100.0


def test_errors_count_as_wrong_and_are_reported(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", ("a", "1"), ("b", "2"))
    engine = FakeEngine({"a": ["\\boxed{1}"], "b": [""]}, errors={"b": "no"})
    measured = evaluation.metrics(evaluate(engine, path), seconds=1.0)
    assert (measured["accuracy"], measured["errors"]) == (0.5, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "none from number 0"),
        ("{}\n", "question 0: not a JSON object"),
        ('{"question": "a", "answer": 1}\nnot json\n', "question 1: not a JSON object"),
        ('{"question": "  ", "answer": 1}\n', "not text"),
        ("[1]\n", "not a JSON object"),
    ],
)
def test_a_bad_file_is_refused_by_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(ParameterError, match=message):
        evaluation.file_questions(path, None, 0)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="data: cannot read"):
        evaluation.file_questions(tmp_path / "none.jsonl", None, 0)


def test_suite_questions_are_judged_by_their_checker() -> None:
    questions = evaluation.suite_questions("medium", 3, offset=4)
    assert [q.index for q in questions] == [4, 5, 6]
    first = questions[0]
    assert first.judge(f"The answer is \\boxed{{{first.expected}}}.")
    assert not first.judge("The answer is \\boxed{-1}.")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["eval", *words])


def test_run_prints_a_table_and_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine({"a": ["\\boxed{1}"], "b": ["\\boxed{3}"]})

    async def start(config: Any) -> FakeEngine:
        return engine

    monkeypatch.setattr(async_engine.AsyncEngine, "start", start)
    path = write_questions(tmp_path / "q.jsonl", ("a", "1"), ("b", "2"))
    args = parse("--data", str(path), "--json", "--no-record", "--out", str(tmp_path / "out.jsonl"))
    assert args.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    row = json.loads(lines[-1])
    assert (row["bench"], row["case"], row["metrics"]["accuracy"]) == ("eval", "q", 0.5)
    assert lines[0].split() == ["task", "n", "accuracy", "thinking", "KV", "peak"]
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [k["samples"][0]["correct"] for k in kept] == [True, False]
    assert engine.stopped


def run_rows(
    engine: FakeEngine, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[list[dict[str, Any]], str]:
    """The rows that a run prints, and what it prints before them."""

    async def start(config: Any) -> FakeEngine:
        return engine

    monkeypatch.setattr(async_engine.AsyncEngine, "start", start)
    args = parse("--data", str(path), "--json", "--no-record", *words)
    assert args.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return rows, "\n".join(line for line in lines if not line.startswith("{"))


def test_a_fold_policy_names_the_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_questions(tmp_path / "q.jsonl", ("a", "1"))
    engine = FakeEngine({"a": ["\\boxed{1}"]})
    (row,), shown = run_rows(engine, path, monkeypatch, capsys, "--fold", "eager", "--fold-entries", "8")
    assert (row["case"], row["metrics"]["folds_mean"], row["metrics"]["kv_peak_entries_mean"]) == ("q/eager", 2, 25)
    assert engine.folds == [FoldParams(policy="eager", entries=8)] and shown.startswith("fold eager")


def test_compare_pairs_two_arms_on_the_same_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_questions(tmp_path / "q.jsonl", *((str(i), "1") for i in range(4)))
    right, wrong = ["\\boxed{1}"], ["\\boxed{2}"]
    engine = FakeEngine(
        {"0": right, "1": right, "2": wrong, "3": right}, folded={"0": right, "1": wrong, "2": right, "3": wrong}
    )
    out = tmp_path / "out.jsonl"
    rows, shown = run_rows(engine, path, monkeypatch, capsys, "--compare", "fold=off,eager", "--out", str(out))
    assert [row["case"] for row in rows] == ["q/off", "q/eager"]
    assert "b" not in rows[0]["metrics"]
    paired = rows[1]["metrics"]
    assert (paired["b"], paired["c"], paired["accuracy_ref"], paired["accuracy"]) == (2, 1, 0.75, 0.5)
    assert (paired["diff_points"], paired["kv_peak_ratio"], paired["thinking_tokens_ratio"]) == (-25.0, 0.25, 1.0)
    assert "b = 2 right only with off, c = 1 right only with eager" in shown and "Tango" in shown
    assert {p.name for p in tmp_path.glob("out*")} == {"out-off.jsonl", "out-eager.jsonl"}
    assert [fold.policy for fold in engine.folds if fold] == ["off"] * 4 + ["eager"] * 4


def test_the_same_policy_twice_is_the_noise_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_questions(tmp_path / "q.jsonl", ("a", "1"))
    rows, _ = run_rows(FakeEngine({"a": ["1"]}), path, monkeypatch, capsys, "--compare", "fold=off,off")
    assert [row["case"] for row in rows] == ["q/off", "q/aa"]
    assert rows[1]["metrics"]["diff_points"] == 0.0


def test_engines_are_compared_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_questions(tmp_path / "q.jsonl", ("a", "1"))
    configs: list[Any] = []

    async def start(config: Any) -> FakeEngine:
        configs.append(config)
        return FakeEngine({"a": ["\\boxed{1}" if config.kv_cache_dtype == "model" else "\\boxed{2}"]})

    monkeypatch.setattr(async_engine.AsyncEngine, "start", start)
    words = ["--data", str(path), "--json", "--no-record", "--fold", "eager"]
    args = parse(*words, "--compare", "kv_cache_dtype=model,fp8_e4m3")
    assert args.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [config.kv_cache_dtype for config in configs] == ["model", "fp8_e4m3"]
    assert [row["case"] for row in rows] == ["q/kv_cache_dtype=model", "q/kv_cache_dtype=fp8_e4m3"]
    assert "kv_cache_dtype fp8_e4m3" in lines
    assert (rows[1]["metrics"]["b"], rows[1]["metrics"]["diff_points"]) == (1, -100.0)


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "0"], ["--offset", "-1"], ["--samples", "4"], ["--concurrency", "0"], ["--temperature", "nan"],
        ["--fold-entries", "-1"], ["--compare", "fold=off"], ["--compare", "fold=off,on"],
        ["--compare", "gate=0,1"], ["--compare", "kv_cache_dtype=model,fp4"], ["--compare", "fold_storage=int4"],
        ["--compare", "fold=off,eager", "--fold", "off"],
        ["--compare", "fold=off,eager", "--samples", "2", "--temperature", "1"],
    ],
)  # fmt: skip
def test_wrong_numbers_are_refused(words: list[str]) -> None:
    args = parse("--suite", "medium", *words)
    with pytest.raises(ParameterError):
        args.run(args)
