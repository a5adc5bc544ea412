"""`thinkfold eval`: accuracy, tokens and speed of a model on a suite or on questions of a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from statistics import fmean

from thinkfold.cli import rows
from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.pebble import SUITES
from thinkfold.types import UNLIMITED, SamplingParams, ThinkingParams

DEFAULT_QUESTIONS = 200


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
    parser.add_argument("--concurrency", type=int, default=32, help="sequences that run at the same time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--out", type=Path, help="write one JSON line a question here")
    parser.add_argument("--json", action="store_true", help="print the result row as the last line")
    parser.add_argument("--no-record", action="store_true", help="do not append the row to benchmarks/results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, keep the row; 1 if a request failed inside the engine. Raises ThinkfoldError."""
    from thinkfold.cli import evaluation
    from thinkfold.runner.loader import pick_device

    _check(args)
    questions = (
        evaluation.suite_questions(args.suite, args.n or DEFAULT_QUESTIONS, args.offset)
        if args.suite
        else evaluation.file_questions(args.data, args.n, args.offset)
    )
    results, seconds = asyncio.run(_evaluate(args, questions))
    measured = evaluation.metrics(results, seconds)
    if args.out:
        evaluation.write_results(args.out, results)
    _print_table({**evaluation.by_task(results), "all": results}, measured)
    row = rows.make_row(
        "eval",
        args.suite or args.data.stem,
        measured,
        seed=args.seed,
        device=str(pick_device(args.device)),
        extra_versions={"model": Path(args.model).name},
    )
    if not args.no_record and (path := rows.keep(row)):
        print(f"row appended to {path.relative_to(path.parents[2])}", file=sys.stderr)
    for failed in (r for r in results if r.error):
        print(f"question {failed.index} failed: {failed.error}", file=sys.stderr)
    if args.json:
        print(json.dumps(row))
    return 1 if measured["errors"] else 0


def _check(args: argparse.Namespace) -> None:
    for name, low in (("n", 1), ("offset", 0), ("samples", 1), ("concurrency", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ParameterError(name, f"must be at least {low}, got {value}")
    if args.samples > 1 and args.temperature == 0:
        raise ParameterError("samples", "more than one sample needs a temperature above 0")


async def _evaluate(args: argparse.Namespace, questions: list) -> tuple[list, float]:
    from tqdm import tqdm

    from thinkfold.cli import evaluation
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
    engine = await AsyncEngine.start(config)
    quiet = not sys.stderr.isatty()
    try:
        with tqdm(total=len(questions), unit="question", file=sys.stderr, mininterval=15 if quiet else 0.2) as bar:
            correct: list[float] = []

            def show(result: evaluation.Result) -> None:
                correct.append(result.accuracy)
                bar.set_postfix(accuracy=f"{fmean(correct):.3f}", refresh=False)
                bar.update()

            return await evaluation.evaluate(engine, questions, sampling, thinking, in_flight=in_flight, on_result=show)
    finally:
        await engine.stop()


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
