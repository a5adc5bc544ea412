"""What do the rules that stop thinking, and votes, save, and what do they cost? Replayed on recorded traces.

`--record FILE` asks the model once: its samples, margins at boundaries, a probe every so many tokens. Every preset,
knob and vote is then replayed on the same records, with tokens of looks counted. `oracle_tokens_ratio` is that of
stopping where all later probes are right. Replays are no live runs: their cases begin with `replay/`.

Thresholds are chosen on one half of the problems (`--half choose`) and reported on the other (`--half report`).
`--against FILE` compares two recordings of the same problems: the noise between runs that differ in nothing
(`aa/`). `--live none balanced …` asks the engine itself: each problem once an arm, with the first arm as reference
(`none` again is the noise), `vote/MODE` with `--samples K --temperature T` beside a plain majority.

Several engines in processes of their own share one device (`--processes`), each with its own pool.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from thinkfold.cli import records, rows
from thinkfold.cli.arms import Arm, Shard, measure
from thinkfold.cli.evaluation import Result
from thinkfold.cli.paired import paired_metrics
from thinkfold.cli.processes import spread
from thinkfold.cli.recording import Share, record
from thinkfold.config import EngineConfig
from thinkfold.control.baselines import Compared, deepconf, majority, one_by_one
from thinkfold.control.early_stop import EarlyStopping
from thinkfold.control.replay import Record, oracle, replay, replay_vote
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.pebble import SUITES
from thinkfold.types import UNLIMITED, ControlParams, FoldParams, Preset, SamplingParams, VoteParams, parse_early_stop

OFFSET = 100_000  # of the first problem: far from those that anybody tunes on
APART = 1_000_003  # between the seeds of two arms of plain samples
BLOCK = 20  # problems of one half in a row: a multiple of every suite's entries
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
OTHERS: Mapping[str, Callable[[Sequence[Record]], Compared]] = {
    "one_by_one": one_by_one,
    "deepconf_high": partial(deepconf, warm_up=4, kept=0.9),
    "deepconf_low": partial(deepconf, warm_up=4, kept=0.1),
}
FEWER = (4, 8)  # samples of plain majorities beside a full one


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
    found = [replay_vote(group, params) for group in groups]
    made = [Compared(one.correct, one.tokens, one.critical_path, one.result.started) for one in found]
    looks = sum(one.look_tokens for one in found)
    return compared_metrics(groups, made, size) | {"probe_share": looks / sum(one.tokens for one in found)}


def compared_metrics(groups: Sequence[Sequence[Record]], found: Sequence[Compared], size: int) -> dict[str, float]:
    """What became of each problem, against the plain majority of its first `size` samples."""
    plain = [majority(group[:size]) for group in groups]
    return {
        **paired_metrics([(one.correct, other.correct) for one, other in zip(plain, found, strict=True)]),
        "tokens_ratio": sum(one.tokens for one in found) / sum(one.tokens for one in plain),
        "critical_path_ratio": sum(one.critical_path for one in found) / sum(one.critical_path for one in plain),
        "probe_share": 0.0,
        "started_mean": fmean(one.started for one in found),
    }


def by_problem(found: Sequence[Record]) -> list[list[Record]]:
    """Samples of each problem, in order of recording."""
    groups: defaultdict[int, list[Record]] = defaultdict(list)
    for one in found:
        groups[one.index].append(one)
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
        for name, rule in OTHERS.items():
            found_by = [rule(group[:size]) for group in groups]
            yield f"replay/vote/{name}_{size}/{suite}", compared_metrics(groups, found_by, size)
        for fewer in (n for n in FEWER if n < size):
            plain = [majority(group[:fewer]) for group in groups]
            yield f"replay/vote/maj@{fewer}/{suite}", compared_metrics(groups, plain, size)
        fresh = [group for group in groups if len(group) >= 2 * size]
        if fresh:
            others = [majority(group[size : 2 * size]) for group in fresh]
            yield f"aa/maj@{size}/{suite}", compared_metrics(fresh, others, size)


def again(found: Sequence[Record], others: Sequence[Record]) -> dict[str, float]:
    """The first sample of each problem in two recordings, paired: nothing but chance is between them."""
    first, second = ({group[0].index: group[0] for group in by_problem(some)} for some in (found, others))
    pairs = [(first[index], second[index]) for index in sorted(first.keys() & second.keys())]
    if not pairs:
        raise ParameterError("against", "the recordings share no problem")
    return {
        **paired_metrics([(one.correct, other.correct) for one, other in pairs]),
        "tokens_ratio": sum(b.thinking_tokens for _, b in pairs) / sum(a.thinking_tokens for a, _ in pairs),
    }


def shares(args: argparse.Namespace) -> list[Share]:
    """One for each process: every so-manieth problem."""
    config = EngineConfig(
        model="pebble",
        device=args.device,
        dtype=args.dtype,
        fold_policy="off",
        max_num_seqs=args.concurrency + (args.concurrency // 4 + 1 if args.probe_every else 0),  # places for probes
        max_waiting=2 * args.concurrency * args.samples,
        kv_cache_bytes=args.kv_cache_bytes,
    )
    sampling = SamplingParams(n=args.samples, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    processes = min(args.processes, args.n)
    numbers = range(args.offset, args.offset + args.n)
    in_flight = max(1, args.concurrency // args.samples)
    return [
        Share(args.suite, list(numbers[k::processes]), config, sampling, args.probe_every, in_flight, 60 * args.minutes)
        for k in range(processes)
    ]


def recorded(args: argparse.Namespace) -> list[Record]:
    """Samples and probes of all problems that were begun, in the order of their numbers."""
    found: dict[int, list[Record]] = {}
    with tqdm(total=args.n, unit="problem", file=sys.stderr) as bar:
        for records_of_one in spread(record, shares(args), args.gpus):
            found[records_of_one[0].index] = records_of_one
            bar.update()
    return [one for _, group in sorted(found.items()) for one in group]


def live_arms(args: argparse.Namespace) -> list[Arm]:
    """`none`, presets and knobs by name, `vote/MODE`. Only `none` after the first one draws other samples."""
    found: list[Arm] = []
    for number, word in enumerate(args.live):
        fold, how = FoldParams(policy="off"), VOTES.get(word.removeprefix("vote/"))
        if word == "none":
            before = args.live[:number].count("none")
            name = f"aa{before if before > 1 else ''}/{args.suite}" if before else "none"
            found.append(Arm(name, fold, seed=before * APART))
        elif word in ARMS:
            found.append(Arm(f"stop/{word}/{args.suite}", fold, ARMS[word]))
        elif word.startswith("vote/") and how is not None and args.samples > 1:
            fitted = replace(how, n=min(how.n, args.samples))
            found.append(Arm(f"{word}_{fitted.n}/{args.suite}", fold, how=fitted))
        else:
            votes = "with --samples " + ", ".join(f"vote/{name}" for name in VOTES)
            raise ParameterError("live", f"there are none, {', '.join(ARMS)}, and {votes}; got {word!r:.60}")
    return found


def live_metrics(reference: Sequence[Result], found: Sequence[Result]) -> dict[str, float]:
    """One arm on the engine against the first one; tokens are all that were generated, looks and discarded ones too."""
    reasons = Counter(sample.thinking_end_reason for one in found for sample in one.samples)
    rules = {rule: count for rule, count in sorted(reasons.items(), key=str) if rule not in (None, "natural")}
    tokens = sum(one.tokens for one in reference)
    return {
        **paired_metrics([(a.majority_correct, b.majority_correct) for a, b in zip(reference, found, strict=True)]),
        "tokens_ratio": sum(one.tokens for one in found) / tokens,
        "probe_share": sum(one.probe_tokens for one in found) / tokens,
        "errors": sum(one.error is not None for one in found),
        **{f"stopped_by_{rule}": count / len(found) for rule, count in rules.items()},
    }


def lived(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Every arm but the first, asked of engines."""
    arms, cut = live_arms(args), shares(args)
    shards = [
        Shard(one.suite, one.config, [(arm, one.numbers) for arm in arms], UNLIMITED, one.sampling, one.in_flight)
        for one in cut
    ]
    reference: list[Result] | None = None
    for arm, results, _ in measure(shards, arms, args.gpus):
        if reference is None:
            reference = results
        else:
            yield arm.name, live_metrics(reference, results)


def half(found: Sequence[Record], which: str) -> list[Record]:
    """`choose` or `report`: every other twenty problems, so that each has all tasks of a suite."""
    return [one for one in found if which == "all" or one.index // BLOCK % 2 == ("choose", "report").index(which)]


def offline(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Every arm that the records allow. Raises ParameterError where there are none."""
    found = half([one for path in args.records or [args.record] for one in records.load(path)], args.half)
    if not found:
        raise ParameterError("records", "there is no record to replay")
    yield from replayed(found, args.suite, args.votes)
    if args.against:
        yield f"aa/{args.suite}", again(found, list(records.load(args.against)))


def main(argv: Sequence[str] | None = None) -> int:
    """Record where asked, replay or ask, print and keep rows."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.record:
        records.save(args.record, recorded(args))
        if args.only_record:
            return 0
    cases = lived(args) if args.live else offline(args)
    for case, metrics in cases:
        label = case if args.half == "all" else f"{case}/{args.half}"
        row = rows.make_row("control", label, metrics, seed=args.seed, device=args.device)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(json.dumps(row) if args.json else f"{label:40} {shown}", flush=True)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench control", description=(__doc__ or "").partition("\n")[0])
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--record", type=Path, metavar="FILE", help="ask the model and keep the records here first")
    files.add_argument("--records", type=Path, nargs="+", metavar="FILE", help="replay these records")
    files.add_argument("--live", nargs="+", metavar="ARM", help="ask the engine: none balanced, none vote/waves, …")
    parser.add_argument("--only-record", action="store_true", help="do not replay what was recorded")
    parser.add_argument("--against", type=Path, metavar="FILE", help="another recording of the same problems")
    parser.add_argument("--half", choices=["all", "choose", "report"], default="all", help="problems to replay")
    parser.add_argument("--suite", default="long", help="to record, and the name in the rows: long+hard for two files")
    parser.add_argument("-n", type=int, default=8, help="problems to record")
    parser.add_argument("--offset", type=int, default=OFFSET, help="number of the first problem")
    parser.add_argument("--samples", type=int, default=1, help="of each problem")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--probe-every", type=int, default=128, metavar="N", help="least tokens between two probes; 0: none"
    )
    parser.add_argument("--processes", type=int, default=1, help="engines side by side (default: 1)")
    parser.add_argument("--gpus", type=int, default=0, help="spread the processes over so many GPUs")
    parser.add_argument("--concurrency", type=int, default=16, help="sequences at a time in each engine (default: 16)")
    parser.add_argument("--kv-cache-bytes", type=int, help="pool of each engine; needed where several share a device")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no problem after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--votes", type=int, default=16, help="samples of a full vote")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args: Any = parser.parse_args(argv)
    if not args.records and args.suite not in SUITES:
        parser.error(f"--suite: there are {', '.join(SUITES)}")
    if min(args.n, args.samples, args.processes, args.concurrency) < 1:
        parser.error("-n, --samples, --processes and --concurrency must be at least 1")
    if args.samples > 1 and args.temperature == 0.0:
        parser.error("--samples: equal samples say nothing; give a --temperature")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThinkfoldError as error:
        sys.exit(f"thinkfold bench control: {error}")
