"""What do the rules that stop thinking, and votes, save, and what do they cost? Replayed on recorded traces.

`--record FILE` asks the model once: its samples, margins at every boundary, a probe every so many tokens. Every
preset, knob and vote is then replayed on the same records, with tokens of looks counted. `oracle_tokens_ratio` is
that of stopping where all later probes are right. Replays are no live runs: their cases begin with `replay/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from thinkfold.cli import records, rows
from thinkfold.cli.evaluation import Question, suite_questions
from thinkfold.cli.paired import paired_metrics
from thinkfold.config import EngineConfig
from thinkfold.control.ballot import tally
from thinkfold.control.early_stop import EarlyStopping
from thinkfold.control.equality import Equality
from thinkfold.control.extract import extract
from thinkfold.control.replay import Record, oracle, replay, replay_one_by_one, replay_vote
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.language import load_language
from thinkfold.pebble import SUITES
from thinkfold.types import ControlParams, Preset, SamplingParams, VoteParams, parse_early_stop

OFFSET = 100_000  # of the first problem: far from those that anybody tunes on
KNOBS = {
    "entropy_0.1": {"entropy": 0.1},
    "confidence_0.95": {"confidence": 0.95},
    "consistency_3_4": {"consistency": "3/4"},
}
ARMS: Mapping[str, ControlParams] = {
    **{str(preset): ControlParams(preset) for preset in Preset},
    **{name: ControlParams(early_stop=parse_early_stop(knob)) for name, knob in KNOBS.items()},
}
VOTES: Mapping[str, VoteParams] = {
    "exact": VoteParams(16, stop="exact"),
    "waves": VoteParams(16),
    "waves_weighted": VoteParams(16, weights="confidence"),
    "all": VoteParams(16, "all"),
    "short": VoteParams(8, "short"),
}


def stop_metrics(found: Sequence[Record], params: ControlParams) -> dict[str, float]:
    """One arm of early stopping over all records, against the same traces left alone."""
    outcomes = [replay(record, EarlyStopping(params)) for record in found]
    thinking = sum(record.thinking_tokens for record in found)
    rules = Counter(outcome.rule for outcome in outcomes if outcome.rule)
    return {
        **paired_metrics([(record.correct, outcome.correct) for record, outcome in zip(found, outcomes, strict=True)]),
        "tokens_ratio": sum(outcome.tokens for outcome in outcomes) / thinking,
        "oracle_tokens_ratio": sum(oracle(record) for record in found) / thinking,
        "probe_share": sum(outcome.look_tokens for outcome in outcomes) / thinking,
        "stopped_share": sum(rules.values()) / len(found),
        **{f"stopped_by_{rule}": count / len(found) for rule, count in sorted(rules.items())},
    }


def vote_metrics(groups: Sequence[Sequence[Record]], params: VoteParams, size: int) -> dict[str, float]:
    """One vote over each problem's samples, against the plain majority of `size` of them."""
    pairs, tokens, full, path, full_path, looks, started = [], 0, 0, 0, 0, 0, 0
    for group in groups:
        found = replay_vote(group, params)
        pairs.append((majority_is_right(group[:size]), found.correct))
        tokens, looks, path = tokens + found.tokens, looks + found.look_tokens, path + found.critical_path
        full += sum(record.output_tokens for record in group[:size])
        full_path += max(record.output_tokens for record in group[:size])
        started += found.result.started
    return {
        **paired_metrics(pairs),
        "tokens_ratio": tokens / full,
        "critical_path_ratio": path / full_path,
        "probe_share": looks / tokens,
        "started_mean": started / len(groups),
    }


def one_by_one_metrics(groups: Sequence[Sequence[Record]], size: int) -> dict[str, float]:
    """Adaptive consistency, which waits for every sample, against the same majority."""
    found = [replay_one_by_one(group[:size]) for group in groups]
    tokens = sum(one[1] for one in found)
    return {
        **paired_metrics([(majority_is_right(group[:size]), one[0]) for group, one in zip(groups, found, strict=True)]),
        "tokens_ratio": tokens / sum(record.output_tokens for group in groups for record in group[:size]),
        "critical_path_ratio": tokens / sum(max(r.output_tokens for r in group[:size]) for group in groups),
        "probe_share": 0.0,
        "started_mean": fmean(one[2] for one in found),
    }


def majority_is_right(group: Sequence[Record]) -> bool:
    """Whether the plain majority of the samples solves the problem."""
    answers = [extract(record.reply).answer for record in group]
    found = tally(answers, [1.0] * len(group), Equality())
    return bool(found.classes) and group[found.classes[0].representative].correct


def by_problem(found: Sequence[Record]) -> list[list[Record]]:
    """Samples of each problem, in order of recording."""
    groups: defaultdict[int, list[Record]] = defaultdict(list)
    for record in found:
        groups[record.index].append(record)
    return list(groups.values())


def replayed(found: Sequence[Record], suite: str, size: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Every arm that the records allow: votes need `size` samples of each problem."""
    with_places = [record for record in found if record.places]
    if with_places:
        for name, params in ARMS.items():
            yield f"replay/stop/{name}/{suite}", stop_metrics(with_places, params)
    groups = [group for group in by_problem(found) if len(group) >= size]
    if groups and size > 1:
        for name, params in VOTES.items():
            fitted = replace(params, n=min(params.n, size))
            yield f"replay/vote/{name}_{fitted.n}/{suite}", vote_metrics(groups, fitted, size)
        yield f"replay/vote/one_by_one_{size}/{suite}", one_by_one_metrics(groups, size)


async def record(args: argparse.Namespace, questions: Sequence[Question]) -> list[Record]:
    """Samples and probes of all questions."""
    config = EngineConfig(model="pebble", fold_policy="off", dtype=args.dtype)
    engine = await AsyncEngine.start(config)
    recorder = records.Recorder(engine, load_language(config), every=args.probe_every)
    gate = asyncio.Semaphore(args.in_flight)
    try:
        with tqdm(total=len(questions), unit="problem", file=sys.stderr) as bar:

            async def one(question: Question) -> list[Record]:
                async with gate:
                    sampling = SamplingParams(
                        n=args.samples, temperature=args.temperature, top_p=args.top_p, seed=args.seed + question.index
                    )
                    found = await recorder.record(question, sampling)
                    bar.update()
                    return found

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(question)) for question in questions]
    finally:
        await engine.stop()
    return [found for task in tasks for found in task.result()]


def main(argv: Sequence[str] | None = None) -> int:
    """Record where asked, replay, print and keep rows."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.record:
        records.save(args.record, asyncio.run(record(args, suite_questions(args.suite, args.n, args.offset))))
    found = list(records.load(args.record or args.records))
    for case, metrics in replayed(found, args.suite, args.votes):
        row = rows.make_row("control", case, metrics, seed=args.seed)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(json.dumps(row) if args.json else f"{case:40} {shown}", flush=True)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench control", description=(__doc__ or "").partition("\n")[0])
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--record", type=Path, metavar="FILE", help="ask the model and keep the records here first")
    files.add_argument("--records", type=Path, metavar="FILE", help="replay these records")
    parser.add_argument("--suite", choices=list(SUITES), default="long")
    parser.add_argument("-n", type=int, default=8, help="problems to record")
    parser.add_argument("--offset", type=int, default=OFFSET, help="number of the first problem")
    parser.add_argument("--samples", type=int, default=1, help="of each problem")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe-every", type=int, default=128, metavar="N", help="least tokens between two probes")
    parser.add_argument("--in-flight", type=int, default=16, help="problems at a time")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--votes", type=int, default=16, help="samples of a full vote")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args: Any = parser.parse_args(argv)
    if args.samples > 1 and args.temperature == 0.0:
        parser.error("--samples: equal samples say nothing; give a --temperature")
    return args


if __name__ == "__main__":
    sys.exit(main())
