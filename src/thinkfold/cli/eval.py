"""`thinkfold eval`: accuracy, tokens and speed of a model on a suite or on questions of a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from thinkfold.cli import rows
from thinkfold.cli.fold_flags import add_fold_flags, fold_params
from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.pebble import SUITES
from thinkfold.types import UNLIMITED, FoldParams, SamplingParams, ThinkingParams

DEFAULT_QUESTIONS = 200
_COMPARE = re.compile(r"(fold|kv_cache_dtype|fold_storage)=(\w+),(\w+)")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `eval` to the command line."""
    parser = subparsers.add_parser(
        "eval", allow_abbrev=False, help="measure a model on a suite or a file of questions", description=__doc__
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--suite", choices=list(SUITES), help="one of Pebble's suites")
    source.add_argument("--data", type=Path, help="JSONL file with question and answer in each line")
    parser.add_argument("--model", default="pebble", help="folder or hub id (default: the embedded model)")
    parser.add_argument("-n", type=int, help=f"questions (default: {DEFAULT_QUESTIONS} of a suite, all of a file)")
    parser.add_argument("--offset", type=int, default=0, help="number of the first question")
    parser.add_argument("--samples", type=int, default=1, help="answers to each question; above 1 also reports maj@k")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="question i samples with seed + i")
    parser.add_argument("--max-tokens", type=int, help="tokens of a response (default: up to the model's length)")
    parser.add_argument(
        "--thinking-token-budget", type=int, default=UNLIMITED, help="thinking tokens (default: -1, no limit)"
    )
    parser.add_argument(
        "--compare",
        metavar="NAME=A,B",
        help="answer the questions with A, then with B, and compare them in pairs: of fold (off, pressure, eager), "
        "kv_cache_dtype or fold_storage",
    )
    parser.add_argument("--concurrency", type=int, default=32, help="sequences that run at the same time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--out", type=Path, help="write one JSON line a question here")
    parser.add_argument("--json", action="store_true", help="print the result row as the last line")
    parser.add_argument("--no-record", action="store_true", help="do not append the row to benchmarks/results")
    add_fold_flags(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer: what to print of it, how requests fold, and how the engine differs from the others'."""

    title: str
    fold: FoldParams
    engine: dict[str, str] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, keep the rows; 1 if a request failed inside the engine. Raises ThinkfoldError."""
    from thinkfold.cli import evaluation

    _check(args)
    arms = _arms(args)
    questions = (
        evaluation.suite_questions(args.suite, args.n or DEFAULT_QUESTIONS, args.offset)
        if args.suite
        else evaluation.file_questions(args.data, args.n, args.offset)
    )
    measured = asyncio.run(_evaluate(args, questions, list(arms.values())))
    reports = [_report(args, name, arms[name].title, *found) for name, found in zip(arms, measured, strict=True)]
    if args.compare:
        from thinkfold.cli.paired import compare

        reference, other = (results for results, _ in measured)
        reports[1] |= (paired := compare(reference, other))
        _print_comparison(list(arms), paired)
    for name, metrics in zip(arms, reports, strict=True):
        row = _row(args, name, metrics)
        if not args.no_record and (path := rows.keep(row)):
            print(f"row appended to {path.relative_to(path.parents[2])}", file=sys.stderr)
        if args.json:
            print(json.dumps(row))
    for failed in (r for results, _ in measured for r in results if r.error):
        print(f"question {failed.index} failed: {failed.error}", file=sys.stderr)
    return 1 if any(metrics["errors"] for metrics in reports) else 0


def _arms(args: argparse.Namespace) -> dict[str, Arm]:
    """What to run by its name in rows; a single arm that names no policy has no name. Raises ParameterError."""
    asked = fold_params(args)
    if args.compare is None:
        policy = args.fold_policy or ""
        return {policy: Arm(policy and f"fold {policy}", asked)}
    found = _COMPARE.fullmatch(args.compare)
    if found is None:
        known = "fold, kv_cache_dtype or fold_storage"
        raise ParameterError("compare", f"must be NAME=A,B with NAME {known}, got {args.compare!r:.60}")
    name, *values = found.groups()
    if name == "fold" and args.fold_policy is not None:
        raise ParameterError("compare", "names the policies; --fold does so, too")
    if args.samples > 1:
        raise ParameterError("compare", "pairs one sample of each question; --samples asks for more")
    if name == "fold":
        arms = [(value, Arm(f"fold {value}", replace(asked, policy=value))) for value in values]
    else:
        arms = [(f"{name}={value}", Arm(f"{name} {value}", asked, {name: value})) for value in values]
    (first, reference), (second, other) = arms
    return {first: reference, "aa" if second == first else second: other}


def _report(args: argparse.Namespace, name: str, title: str, results: list, seconds: float) -> dict[str, float]:
    """Write and print what one arm did; its metrics."""
    from thinkfold.cli import evaluation

    measured = evaluation.metrics(results, seconds)
    if args.out:
        path = args.out.with_stem(f"{args.out.stem}-{name}") if args.compare else args.out
        evaluation.write_results(path, results)
    if title:
        print(title)
    _print_table({**evaluation.by_task(results), "all": results}, measured)
    return measured


def _row(args: argparse.Namespace, arm: str, measured: dict[str, float]) -> dict[str, Any]:
    from thinkfold.runner.loader import pick_device

    suite = args.suite or args.data.stem
    return rows.make_row(
        "eval",
        f"{suite}/{arm}" if arm else suite,
        measured,
        seed=args.seed,
        device=str(pick_device(args.device)),
        extra_versions={"model": Path(args.model).name},
    )


def _check(args: argparse.Namespace) -> None:
    for name, low in (("n", 1), ("offset", 0), ("samples", 1), ("concurrency", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ParameterError(name, f"must be at least {low}, got {value}")
    if args.samples > 1 and args.temperature == 0:
        raise ParameterError("samples", "more than one sample needs a temperature above 0")


async def _evaluate(args: argparse.Namespace, questions: list, arms: list[Arm]) -> list[tuple[list, float]]:
    """Results and seconds of each arm, all on one engine if that is the same for all."""
    from thinkfold.engine.async_engine import AsyncEngine

    in_flight = 2 * args.concurrency  # a finished sequence finds the next one waiting
    sampling = SamplingParams(
        n=args.samples,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    thinking = ThinkingParams(thinking_token_budget=args.thinking_token_budget)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.concurrency,
        max_waiting=in_flight * args.samples,
    )
    engines = [replace(config, **arm.engine) for arm in arms]  # what an engine refuses is refused before any starts
    measured = []
    for own, alike in groupby(zip(engines, arms, strict=True), key=itemgetter(0)):
        engine = await AsyncEngine.start(own)
        try:
            for _, arm in alike:
                measured.append(await _ask_all(engine, questions, sampling, thinking, arm.fold, in_flight))
        finally:
            await engine.stop()
    return measured


async def _ask_all(
    engine: Any, questions: list, sampling: SamplingParams, thinking: ThinkingParams, fold: FoldParams, in_flight: int
) -> tuple[list, float]:
    from tqdm import tqdm

    from thinkfold.cli import evaluation

    quiet = not sys.stderr.isatty()
    with tqdm(total=len(questions), unit="question", file=sys.stderr, mininterval=15 if quiet else 0.2) as bar:
        correct: list[float] = []

        def show(result: evaluation.Result) -> None:
            correct.append(result.accuracy)
            bar.set_postfix(accuracy=f"{fmean(correct):.3f}", refresh=False)
            bar.update()

        return await evaluation.evaluate(
            engine, questions, sampling, thinking, fold, in_flight=in_flight, on_result=show
        )


def _print_comparison(arms: list[str], paired: dict[str, float]) -> None:
    print(
        f"{arms[1]} against {arms[0]}: {paired['diff_points']:+.2f} points, lower 95 % bound "
        f"{paired['diff_ci95_low']:+.2f}, upper {paired['diff_ci95_high']:+.2f} (Tango's score interval, two-sided)"
    )
    print(
        f"discordant: b = {paired['b']} right only with {arms[0]}, c = {paired['c']} right only with {arms[1]}; "
        f"thinking tokens x {paired['thinking_tokens_ratio']:.3f}, KV peak x {paired['kv_peak_ratio']:.3f}"
    )


def _print_table(groups: dict[str, list], measured: dict[str, float]) -> None:
    print(f"{'task':16} {'n':>5} {'accuracy':>9} {'thinking':>9} {'KV peak':>8}")
    for task, results in groups.items():
        samples = [sample for result in results for sample in result.samples]
        thinking = fmean(s.thinking_tokens for s in samples) if samples else 0.0
        accuracy, peak = fmean(r.accuracy for r in results), fmean(r.kv_peak_entries for r in results)
        print(f"{task:16} {len(results):5} {accuracy:9.3f} {thinking:9.0f} {peak:8.0f}")
    print(
        f"accuracy {measured['accuracy']:.3f} [{measured['ci95_low']:.3f}, {measured['ci95_high']:.3f}], "
        f"{measured['output_tokens_per_s']:.0f} output tokens/s, {measured['seconds']:.0f} s"
    )
    if "maj_at_k" in measured:
        print(
            f"maj@{measured['samples']} {measured['maj_at_k']:.3f} "
            f"[{measured['maj_ci95_low']:.3f}, {measured['maj_ci95_high']:.3f}]"
        )
