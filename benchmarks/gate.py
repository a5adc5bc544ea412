"""Does the gate know which folds are bad? Rank correlation of its estimate with the loss that a fold causes.

Every fold is made alone, everything else stays raw: the estimate is that of the engine (the same queries, at the same
position), the true error is the KL to full KV, and the rise of the loss, over the `--horizon` tokens that come after
it. Pebble reads recorded answers to `long` problems and folds where the engine would; SmolLM2 reads technical prose and
folds eight stretches of 512, each 256 tokens after its end. Spearman's rank correlation is over folds: of each arm, and
of all arms together. What costs less than rounding moves (`NOISE`) costs nothing; such folds share their rank, and
`costly` counts the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from thinkfold.cli import bench, rows
from thinkfold.cli.capture import use_tape
from thinkfold.cli.prose import JUDGED, load_smollm2, read_ids
from thinkfold.cli.traces import cuts
from thinkfold.config import EngineConfig
from thinkfold.engine.language import load_language
from thinkfold.fold import gate, selectors
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.fold.segments import Entries
from thinkfold.fold.spans import Span
from thinkfold.types import FOLD_PROFILES

fold: Any = bench.load(Path(__file__).with_name("fold.py"))  # where folds happen and who judges them

NOISE = 1e-6  # nats a token; the KL of two fp32 readings that differ in rounding alone is below it
STRETCH, DELAY, PROMPT = 512, 256, 4  # of SmolLM2's texts, in tokens
ARMS = {
    "pebble": ("conclusion_attention/32", "conclusion_attention/8", "streaming/32", "attention_matching/32", "drop/0"),
    "smollm2": ("conclusion_attention/128", "conclusion_attention/32", "snap/64", "streaming/64", "drop/0"),
}


@dataclass(frozen=True, slots=True)
class Text:
    """A text as full KV has it, and what is folded: (span, position before which the fold is made, ends known then)."""

    ids: Tensor
    prompt: int
    memory: Any  # fold.Memory
    hidden: Tensor  # [tokens, size] of the last layer
    folds: list[tuple[Span, int, list[int]]]


def read_text(reader: Any, ids: Tensor, prompt: int, folds: list[tuple[Span, int, list[int]]]) -> Text:
    """Read everything once."""
    reader.tape.memory = None
    hidden = reader.model.base_model(ids[None], use_cache=False).last_hidden_state[0]
    record, raw = reader.tape.take(), torch.ones(len(ids), dtype=torch.bool)
    return Text(ids, prompt, fold.Memory(record.keys, record.values, record.queries, raw), hidden, folds)


@dataclass(frozen=True, slots=True)
class Judged:
    """One fold: what the gate estimated, and what it cost in nats a token."""

    arm: str
    estimate: float
    kl: float
    dnll: float


def pebble_texts(reader: Any, args: argparse.Namespace) -> Iterator[Text]:
    """Recorded answers with the folds that the engine would make."""
    family = load_language(EngineConfig(model="pebble")).family
    assert family is not None
    for trace in fold.take_traces(args):
        ends, answer_start = cuts(family, trace, FOLD_PROFILES[args.profile])
        ids, prompt = torch.tensor(trace.prompt + trace.output), len(trace.prompt)
        planner = fold.Arm("drop", True, 0).planner(args.profile, prompt)
        planner.observe(ends, answer_start)
        folds = []
        for span in planner.spans:
            known = [prompt + end for end in ends if prompt + end <= span.due]
            folds.append((span, span.due, known))
        yield read_text(reader, ids, prompt, folds)


def smollm2_texts(reader: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[Text]:
    """Technical prose in equal stretches."""
    starts = range(PROMPT, PROMPT + args.stretches * STRETCH, STRETCH)
    for name in JUDGED[: args.n]:
        ids = read_ids(tokenizer, name, starts[-1] + STRETCH + DELAY + args.horizon)
        spans = [Span(start, start + STRETCH, start + STRETCH + DELAY) for start in starts]
        yield read_text(reader, ids, 0, [(span, span.due, []) for span in spans])


def judge(reader: Any, text: Text, arms: Sequence[Any], horizon: int) -> Iterator[Judged]:
    """Every fold of a text under every arm."""
    head = reader.model.get_output_embeddings()
    for span, now, ends in text.folds:
        stop = min(now + horizon, len(text.ids) - 1)
        if stop <= now:
            continue
        full, wrote = head(text.hidden[now:stop]).log_softmax(-1), text.ids[now + 1 : stop + 1, None]
        raw = slice(span.start, span.end)
        for arm in arms:
            summary, judged_by = reader.summarise(text.memory, span, now, text.prompt, arm, ends)
            folded = summary.entries(text.memory.keys[None, :, :, raw], text.memory.values[None, :, :, raw])
            held = Entries(folded.keys[0], folded.values[0], folded.bias[0])
            text.memory.raw[raw], text.memory.summaries[:] = False, [held]
            after = reader.forward(text.memory, text.ids, now, stop, keep=False)
            text.memory.raw[raw], text.memory.summaries[:] = True, []
            kl = kl_div(after, full, reduction="batchmean", log_target=True).item()
            dnll = (full - after).gather(1, wrote).mean().item()
            yield Judged(f"{arm.selector}/{arm.entries}", float(gate.estimate(judged_by, summary)), kl, dnll)


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value from 1 on; equals share their mean rank."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) + 1) / 2 for value in values]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; 0 where one side does not vary."""
    pairs = torch.tensor([ranks(left), ranks(right)], dtype=torch.float64)
    centred = pairs - pairs.mean(1, keepdim=True)
    norm = float(centred.norm(dim=1).prod())
    return float(centred[0] @ centred[1]) / norm if norm else 0.0


def metrics(folds: Sequence[Judged]) -> dict[str, float]:
    """The numbers of a row."""
    estimates, kls, dnlls = ([getattr(f, name) for f in folds] for name in ("estimate", "kl", "dnll"))
    return {
        "n": len(folds),
        "costly": sum(kl > NOISE for kl in kls),
        "gate_spearman": spearman(estimates, [kl if kl > NOISE else 0.0 for kl in kls]),
        "gate_spearman_dnll": spearman(estimates, [dnll if abs(dnll) > NOISE else 0.0 for dnll in dnlls]),
        "estimate_mean": fmean(estimates),
        "kl": fmean(kls),
        "dnll": fmean(dnlls),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Judge all folds, print and keep the rows."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    if args.model == "pebble":
        reader = fold.pebble_reader(args)
        texts = pebble_texts(reader, args)
    else:
        model, tokenizer = load_smollm2()
        shape = model.config.num_hidden_layers, model.config.num_key_value_heads
        reader = fold.Reader(model, use_tape(model), FoldBudgets.load(args.table, *shape), args.profile)
        texts = smollm2_texts(reader, tokenizer, args)
    arms = [fold.Arm(name, True, int(entries)) for name, _, entries in (a.partition("/") for a in args.arm)]
    found: list[Judged] = []
    for text in texts:
        found += judge(reader, text, arms, args.horizon)
        print(f"{time.perf_counter() - started:7.0f} s {len(found)} folds", file=sys.stderr, flush=True)
        if time.perf_counter() - started > 60 * args.minutes:
            break
    for arm in (*dict.fromkeys(f.arm for f in found), "all"):
        numbers = metrics([f for f in found if arm in (f.arm, "all")])
        versions = {"horizon": str(args.horizon), "table": "calibrated" if reader.budgets.calibrated else "uniform"}
        row = rows.make_row("gate", f"{args.model}/{arm}", numbers, seed=args.offset, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        print(json.dumps(row) if args.json else f"{row['case']:40} {shown}", flush=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench gate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(ARMS), default="pebble")
    parser.add_argument("--arm", nargs="+", metavar="SELECTOR/ENTRIES", help="default: five of them")
    parser.add_argument("-n", type=int, default=4, help="texts that are read")
    parser.add_argument("--horizon", type=int, default=512, help="tokens after a fold that say what it cost")
    parser.add_argument("--stretches", type=int, default=8, help="SmolLM2: folds of a text")
    parser.add_argument("--suite", default="long", help="Pebble: where the questions come from")
    parser.add_argument("--offset", type=int, default=fold.OFFSET, help="Pebble: number of the first problem")
    parser.add_argument("--max-tokens", type=int, help="Pebble: of an answer (default: up to the model's length)")
    parser.add_argument("--traces", type=Path, help="Pebble: file of recorded answers: read if there, else written")
    parser.add_argument("--profile", choices=list(FOLD_PROFILES), default="pebble")
    parser.add_argument("--table", type=Path, help="another budget table than the model's own")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further text after this time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    parser.set_defaults(uniform=False, conclusion=None)
    args = parser.parse_args(argv)
    args.arm = args.arm or ARMS[args.model]
    for arm in args.arm:
        name, _, entries = arm.partition("/")
        if name not in selectors.names() or not entries.isdigit():
            parser.error(f"--arm must be like conclusion_attention/32, got {arm!r}")
    if args.n < 1 or args.horizon < 1 or args.stretches < 1:
        parser.error("-n, --horizon and --stretches must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
