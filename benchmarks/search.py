"""Does a search over steps of thinking solve more than a vote for the same tokens? Live, on Countdown.

Each problem is first asked `--samples` times for a plain majority. Beam and tree then get, problem by problem, as
many tokens as that took: dropped states, probes and answers included. `any_ref` is the share of problems that at
least one of the samples solves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tqdm import tqdm

from thinkfold.cli import rows
from thinkfold.cli.evaluation import Question, judged, suite_questions
from thinkfold.cli.paired import paired_metrics
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.llm import collect
from thinkfold.types import SamplingParams, SearchParams, SearchState
from thinkfold.types.search import MIN_RESERVE

OFFSET = 100_000  # of the first problem: far from those that anybody tunes on
EVERY = {"medium": 10, "long": 4}  # suites with Countdown, and how many problems hold one
# Width, branch, least and most tokens of a step: paths of Pebble's usual length fit into eight samples' tokens.
SIZES = {"beam": (2, 3, 48, 96), "tree": (2, 3, 128, 256)}


@dataclass(slots=True)
class Found:
    """What became of one problem: the vote, and each search."""

    right: bool
    any_right: bool
    tokens: int
    searches: dict[str, tuple[bool, SearchState]] = field(default_factory=dict)


def metrics(found: Sequence[Found], kind: str) -> dict[str, float]:
    """One kind of search over all problems, against the vote."""
    searches = [one.searches[kind] for one in found]
    states = [state for _, state in searches]
    tokens, vote = sum(state.tokens for state in states), sum(one.tokens for one in found)
    return {
        **paired_metrics([(one.right, right) for one, (right, _) in zip(found, searches, strict=True)]),
        "any_ref": fmean(one.any_right for one in found),
        "tokens_ratio": tokens / vote,
        "tokens_ref_mean": vote / len(found),
        "kept_share": sum(state.kept_tokens for state in states) / tokens,
        "probe_share": sum(state.probe_tokens for state in states) / tokens,
        "deepest_mean": fmean(state.deepest for state in states),
        "stopped_by_tokens": fmean(state.rule == "max_tokens" for state in states),
    }


async def ask(engine: AsyncEngine, question: Question, args: argparse.Namespace) -> Found:
    """The vote and the searches on one problem."""
    prompt = engine.prompts.encode_chat([{"role": "user", "content": question.text}])
    sampling = SamplingParams(n=args.samples, temperature=args.temperature, seed=args.seed + question.index)
    vote = judged(question, await collect(engine, prompt, sampling))
    tokens = sum(sample.output_tokens for sample in vote.samples)
    found = Found(vote.majority_correct, any(sample.correct for sample in vote.samples), tokens)
    one = SamplingParams(temperature=args.temperature, seed=args.seed + question.index)
    for kind in args.kinds:
        width, branch, low, high = SIZES[kind]
        how = SearchParams(kind, width, branch, score=args.score, min_step_tokens=low, max_step_tokens=high)
        how = replace(how, max_tokens=max(branch * (high + how.score_tokens) + MIN_RESERVE, tokens))
        output = await collect(engine, prompt, one, how=how)
        assert isinstance(output.outcome, SearchState)
        found.searches[kind] = question.judge(output.outputs[0].text), output.outcome
    return found


async def ask_all(args: argparse.Namespace) -> list[Found]:
    """As many problems as fit into `--minutes`, in their order."""
    every = EVERY[args.suite]
    known = suite_questions(args.suite, args.n * every, args.offset)
    questions = [question for question in known if question.task == "countdown"]
    engine = await AsyncEngine.start(EngineConfig(device=args.device, fold_policy="off", max_num_seqs=64))
    gate, until = asyncio.Semaphore(args.in_flight), time.monotonic() + 60 * args.minutes
    try:
        with tqdm(total=len(questions), unit="problem", file=sys.stderr) as bar:

            async def one(question: Question) -> Found | None:
                async with gate:
                    if time.monotonic() > until:
                        return None
                    found = await ask(engine, question, args)
                    bar.update()
                    return found

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(question)) for question in questions]
    finally:
        await engine.stop()
    return [found for task in tasks if (found := task.result()) is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, print and keep rows."""
    args = parse(sys.argv[1:] if argv is None else argv)
    found = asyncio.run(ask_all(args))
    for kind in args.kinds:
        case = f"{kind}_{args.score}/maj@{args.samples}/countdown_{args.suite}"
        row = rows.make_row("search", case, metrics(found, kind), seed=args.seed, device=args.device)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{case:40} {shown}", flush=True)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench search", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", choices=list(EVERY), default="medium")
    parser.add_argument("-n", type=int, default=8, help="problems")
    parser.add_argument("--offset", type=int, default=OFFSET, help="number of the first problem")
    parser.add_argument("--samples", type=int, default=8, help="of the vote")
    parser.add_argument("--kinds", nargs="+", choices=["beam", "tree"], default=["beam", "tree"])
    parser.add_argument("--score", choices=["confidence", "probe"], default="confidence")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-flight", type=int, default=8, help="problems at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no problem after so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args: Any = parser.parse_args(argv)
    return args


if __name__ == "__main__":
    sys.exit(main())
