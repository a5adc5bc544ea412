"""Asking an engine many questions and counting what came back. Knows no command line and prints nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from thinkfold.cli.answers import final_answer, majority, same_answer, wilson
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.llm import collect
from thinkfold.pebble import problems, score
from thinkfold.types import (
    ControlParams,
    Costs,
    Decision,
    FinishReason,
    FoldParams,
    RequestOutput,
    SamplingParams,
    ThinkingParams,
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `judge` says whether an answer text is right."""

    index: int
    task: str
    text: str
    expected: str
    judge: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to one question; counts are tokens."""

    answer: str | None
    correct: bool
    output_tokens: int
    thinking_tokens: int
    finish_reason: str
    thinking_end_reason: str | None


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of one question; `majority_correct` judges the answer with most votes."""

    index: int
    task: str
    question: str
    expected: str
    samples: list[Sample]
    majority_correct: bool
    kv_peak_entries: int
    folds: int
    error: str | None
    tokens: int = 0  # all that were computed for the answer, of cancelled samples and looks, too
    probe_tokens: int = 0

    @property
    def accuracy(self) -> float:
        return fmean(s.correct for s in self.samples) if self.samples else 0.0


def suite_questions(suite: str, n: int, offset: int) -> list[Question]:
    """Problems `offset` to `offset + n` of one of Pebble's suites, judged by their own checkers."""
    if find_spec("reasoning_gym") is None:
        raise ThinkfoldError("the suites need reasoning-gym's scorers: pip install 'thinkfold[eval]'")

    def question(index: int, problem: Any) -> Question:
        return Question(index, problem.task, problem.question, problem.answer, lambda text: score(problem, text) >= 1.0)

    return [question(offset + i, problem) for i, problem in enumerate(problems(suite, n, offset))]


def file_questions(path: Path, n: int | None, offset: int) -> list[Question]:
    """Questions of a JSONL file with `question` and `answer` (and `task`, if it has one) in each line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("data", f"cannot read {path}: {error}") from None
    chosen = list(enumerate(lines))[offset : None if n is None else offset + n]
    if not chosen:
        raise ParameterError("data", f"{path} has {len(lines)} questions, none from number {offset} on")
    return [_file_question(path, index, line) for index, line in chosen]


def _file_question(path: Path, index: int, line: str) -> Question:
    where = f"{path}, question {index}"
    try:
        entry = json.loads(line)
        text, expected = entry["question"], str(entry["answer"])
    except (ValueError, KeyError, TypeError):
        raise ParameterError("data", f"{where}: not a JSON object with question and answer") from None
    if not isinstance(text, str) or not text.strip():
        raise ParameterError("data", f"{where}: the question is not text")

    def judge(answer_text: str) -> bool:
        answer = final_answer(answer_text)
        return answer is not None and same_answer(answer, expected)

    return Question(index, str(entry.get("task", "all")), text, expected, judge)


async def evaluate(
    engine: AsyncEngine,
    questions: Iterable[Question],
    sampling: SamplingParams,
    thinking: ThinkingParams,
    fold: FoldParams | None = None,
    control: ControlParams | None = None,
    how: Decision | None = None,
    *,
    in_flight: int,
    on_result: Callable[[Result], None],
) -> tuple[list[Result], float]:
    """Ask all questions, at most `in_flight` at a time; results in the order of questions, and seconds taken.

    Question number i samples with seed `sampling.seed + i`. A request that fails inside the engine is a
    result with `error`; refused parameters and a dead engine raise.
    """
    gate = asyncio.Semaphore(in_flight)

    async def one(question: Question) -> Result:
        async with gate:
            seeded = replace(sampling, seed=(sampling.seed or 0) + question.index)
            prompt = engine.prompts.encode_chat([{"role": "user", "content": question.text}])
            result = judged(question, await collect(engine, prompt, seeded, thinking, fold, control, how))
        on_result(result)
        return result

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(question)) for question in questions]
    return [task.result() for task in tasks], time.perf_counter() - started


def judged(question: Question, output: RequestOutput) -> Result:
    """Score every branch of an output."""
    texts = [branch.text for branch in output.outputs]
    samples = [
        Sample(
            answer=final_answer(branch.text),
            correct=question.judge(branch.text),
            output_tokens=branch.num_output_tokens,
            thinking_tokens=branch.num_thinking_tokens,
            finish_reason=str(branch.finish_reason),
            thinking_end_reason=branch.thinking_end_reason and str(branch.thinking_end_reason),
        )
        for branch in output.outputs
    ]
    winner = majority([sample.answer for sample in samples])
    return Result(
        index=question.index,
        task=question.task,
        question=question.text,
        expected=question.expected,
        samples=samples,
        majority_correct=winner is not None and question.judge(texts[winner]),
        kv_peak_entries=output.costs.kv_peak_entries,
        folds=output.costs.folds,
        error=output.error,
        tokens=generated(output.costs),
        probe_tokens=output.costs.probe_tokens,
    )


def generated(costs: Costs) -> int:
    """Output tokens, of cancelled samples, too, and those of looks."""
    return costs.thinking_tokens + costs.answer_tokens + costs.discarded_tokens + costs.probe_tokens


def metrics(results: list[Result], seconds: float) -> dict[str, float]:
    """The numbers of an eval row. With k > 1 samples a question accuracy is pass@1, the mean over samples."""
    samples = [sample for result in results for sample in result.samples]
    n = len(results)
    correct = sum(result.accuracy for result in results)
    low, high = wilson(correct, n)
    row: dict[str, float] = {
        "accuracy": correct / n,
        "ci95_low": low,
        "ci95_high": high,
        "n": n,
        "thinking_tokens_mean": fmean(s.thinking_tokens for s in samples) if samples else 0.0,
        "thinking_tokens_max": max((s.thinking_tokens for s in samples), default=0),
        "output_tokens_per_s": sum(s.output_tokens for s in samples) / seconds,
        "kv_peak_entries_mean": fmean(result.kv_peak_entries for result in results),
        "folds_mean": fmean(result.folds for result in results),
        "cut_by_length": sum(s.finish_reason == FinishReason.LENGTH for s in samples),
        "errors": sum(result.error is not None for result in results),
        "seconds": seconds,
    }
    per_question = max(len(result.samples) for result in results)
    if per_question > 1:
        voted = sum(result.majority_correct for result in results)
        low, high = wilson(voted, n)
        row |= {"samples": per_question, "maj_at_k": voted / n, "maj_ci95_low": low, "maj_ci95_high": high}
    return row


def by_task(results: list[Result]) -> dict[str, list[Result]]:
    """Results of each task, tasks in order of name."""
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.task].append(result)
    return dict(sorted(groups.items()))


def write_results(path: Path, results: list[Result]) -> None:
    """One JSON line a question."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(result), ensure_ascii=False) + "\n" for result in results)
