"""What does Pebble lose on its own long answers when finished thinking is folded, by selector, time and size?

Greedy answers to problems of a suite are read again token for token (teacher-forced) while segments are cut, judged and
folded at the positions at which the engine does it, and compared with the same reading under full KV: loss in nats a
token, KL, share of tokens whose greedy choice changes, and entries held as a share of the output. Nothing is sampled,
so an arm costs one reading; whether answers stay right is another question. With `--storage int4` every arm is read
again with as many entries as fill the same bytes in 4 bits instead of 16, and once with all of every segment kept so.
With `--model smollm2` see fold_heads.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from tqdm import tqdm

from thinkfold.attention.int4 import Layout, page_blocks
from thinkfold.cli import bench, rows
from thinkfold.cli.capture import Tape, use_tape
from thinkfold.cli.evaluation import suite_questions
from thinkfold.cli.traces import Trace, cuts, load, save, write_traces
from thinkfold.config import EngineConfig
from thinkfold.engine.language import load_language
from thinkfold.fold import gate, selectors
from thinkfold.fold.budgets import BUDGETS_FILE, OWN, FoldBudgets
from thinkfold.fold.compaction import rotate
from thinkfold.fold.planner import FoldPlanner
from thinkfold.fold.segments import Entries, Segments, Summary, raw_entries
from thinkfold.fold.spans import Span
from thinkfold.pebble import SUITES, pebble_path
from thinkfold.runner.fold_queries import FoldQueries
from thinkfold.runner.folder import in_blocks
from thinkfold.runner.query_store import QueryStore
from thinkfold.scheduler.output import BatchRow
from thinkfold.types import FOLD_PROFILES, FoldMode, FoldPolicy

PAGE_SIZE = 16
OFFSET = 900_004  # number of the first problem, far from those of any eval and of the shipped budget table
ENTRIES = (8, 16, 32)
WHOLE = "all"  # in the place of a selector: everything stays, in 4 bits


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to fold: `gate` is the largest error that a fold may have, `late` waits for what follows a segment.

    `int4`: what it keeps is kept in 4 bits, and `entries` are the memory of so many in 16.
    """

    selector: str
    late: bool
    entries: int
    gate: float = 1.0
    int4: bool = False

    @property
    def case(self) -> str:
        """As rows name it."""
        words = [self.selector, "late" if self.late else "now", str(self.entries)]
        return "/".join([*words, "gate" if self.gate < 1 else "nogate", *["int4"] * self.int4])

    def planner(self, profile: str, prompt_tokens: int) -> FoldPlanner:
        """What says when the engine would fold: at once, or after the profile's delay."""
        policy = FoldPolicy(policy=FoldMode.EAGER, profile=profile, selector=self.selector, entries=self.entries)
        at_once = None if self.late else replace(policy.numbers, fold_delay=0, keep_raw_tokens=0)
        return FoldPlanner(policy, PAGE_SIZE, prompt_tokens, numbers=at_once)


@dataclass(slots=True)
class Memory:
    """KV of one reading: raw by position `[L, H, N, D]`, what is left of it, and summaries by fold."""

    keys: Tensor
    values: Tensor
    queries: Tensor  # [L, H, group, N, D]
    raw: Tensor  # [N], whether the position is held raw
    summaries: list[Entries] = field(default_factory=list)  # [L, H, E, D]
    share: float = 1.0  # of a raw entry's memory that one of a summary takes

    @property
    def summary_entries(self) -> float:
        """Raw entries a head that would take the summaries' memory, mean over layers and heads."""
        entries = sum(float(s.bias.isfinite().sum()) for s in self.summaries)
        return self.share * entries / self.keys[:, :, 0, 0].numel()

    def held(self, stop: int) -> Entries:
        """What a token at `stop` sees of the past, `[L, H, E, D]`."""
        at = self.raw[:stop].nonzero()[:, 0]
        parts = [raw_entries(self.keys[:, :, at], self.values[:, :, at]), *self.summaries]
        return Entries(*(torch.cat([getattr(p, name) for p in parts], 2) for name in ("keys", "values", "bias")))


@dataclass(frozen=True, slots=True)
class Reading:
    """Log-probabilities `[output, vocabulary]` and entries of the output: `peak`, `mean`; `errors` of all folds."""

    logprobs: Tensor
    peak: float
    mean: float
    errors: list[float]


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads traces under arms."""

    model: Any
    tape: Tape
    budgets: FoldBudgets
    profile: str
    options: dict[str, Any] = field(default_factory=dict)  # of the selector

    def read(self, trace: Trace, ends: Sequence[int], answer_start: int | None, arm: Arm | None) -> Reading:
        """One reading; None keeps everything. `ends` and `answer_start` as `cuts` gives them."""
        ids, prompt = torch.tensor(trace.prompt + trace.output), len(trace.prompt)
        memory, last = self.memory(len(ids), int4=arm is not None and arm.int4), len(ids) - 1
        planner = arm.planner(self.profile, prompt) if arm else None
        position, peak, total = 0, 0.0, 0.0
        logprobs: list[Tensor] = []
        errors: list[float] = []
        prepared: list[tuple[Span, Entries, float]] = []
        while position < last:
            stop = last
            if planner:
                known = [end for end in ends if prompt + end <= position]
                planner.observe(known, answer_start if (answer_start or last) + prompt <= position else None)
                self._fold(planner, memory, position, prepared, errors, arm, [prompt + end for end in known])
                coming = [prompt + e for e in (*ends, answer_start or last) if prompt + e > position]
                stop = min(last, *coming, planner.next_event(position) or last)
            logprobs.append(self.forward(memory, ids, position, stop)[max(0, prompt - 1 - position) :])
            held = float(memory.raw[prompt:stop].sum()) + memory.summary_entries
            grown = max(0, stop - max(position, prompt))
            peak, total = max(peak, held), total + grown * (held - (grown - 1) / 2)
            position = stop
        return Reading(torch.cat(logprobs), peak, total / max(1, last - prompt), errors)

    def memory(self, tokens: int, *, int4: bool = False) -> Memory:
        """Room for so many tokens, none of them read."""
        config = self.model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads)
        group, dim = config.num_attention_heads // shape[1], config.head_dim
        keys, values = torch.zeros(2, *shape, tokens, dim)
        queries, share = (
            torch.zeros(*shape, group, tokens, dim),
            shape[0] * shape[1] / self.page_blocks if int4 else 1.0,
        )
        return Memory(keys, values, queries, torch.ones(tokens, dtype=torch.bool), share=share)

    @property
    def page_blocks(self) -> int:
        """int4 blocks in the bytes of a page of 16-bit numbers."""
        config = self.model.config
        return page_blocks(
            config.num_hidden_layers, config.num_key_value_heads, PAGE_SIZE, config.head_dim, torch.bfloat16
        )

    def forward(self, memory: Memory, ids: Tensor, start: int, stop: int, *, keep: bool = True) -> Tensor:
        """Log-probabilities `[stop - start, vocabulary]` behind tokens that see what `memory` holds; `keep` theirs."""
        past = memory.held(start)
        used = past.bias.isfinite().any(1)  # per layer: columns that some head uses
        parts = zip(past.keys, past.values, past.bias, used, strict=True)
        self.tape.memory = [Entries(k[:, u], v[:, u], b[:, u]) for k, v, b, u in parts]
        positions = torch.arange(start, stop)[None]
        logits = self.model(ids[None, start:stop], position_ids=positions, use_cache=False).logits[0]
        record = self.tape.take()
        if keep:
            memory.keys[:, :, start:stop], memory.values[:, :, start:stop] = record.keys, record.values
            memory.queries[:, :, :, start:stop] = record.queries
        return logits.log_softmax(-1)

    def _fold(
        self,
        planner: FoldPlanner,
        memory: Memory,
        position: int,
        prepared: list[tuple[Span, Entries, float]],
        errors: list[float],
        arm: Arm | None,
        ends: Sequence[int],
    ) -> None:
        """Commit and prepare what is due before the token at `position`, as the engine does."""
        assert arm is not None
        while planner.to_commit(position) is not None:
            span, folded, error = prepared.pop(0)
            errors.append(error)
            if error > arm.gate:
                planner.give_up(span)
                continue
            raw = slice(span.start, span.end)
            memory.summaries.append(Entries(folded.keys[0], folded.values[0], folded.bias[0]))
            memory.raw[raw] = False
            planner.remove(span)
        while (span := planner.to_prepare(position)) is not None:
            summary, judged_by = self.summarise(memory, span, position, planner.num_prompt_tokens, arm, ends)
            folded = summary.entries(judged_by.keys, judged_by.values)
            if arm.int4:
                folded = in_blocks(folded, Layout.of(PAGE_SIZE, memory.keys.shape[-1]))[1]
            prepared.append((span, folded, float(gate.estimate(judged_by, folded))))
            planner.prepare(span, position)

    def summarise(
        self, memory: Memory, span: Span, now: int, prompt: int, arm: Arm, ends: Sequence[int]
    ) -> tuple[Summary, Segments]:
        """A span's summary as the engine makes it before position `now`, and what the gate judges it by."""
        inv_freq = self.model.base_model.rotary_emb.inv_freq
        chosen_by, judged_by = judges(memory, span, now, prompt, inv_freq)
        inside = range(span.start, span.end + PAGE_SIZE)  # a segment ends within a page behind its span
        chosen_by = replace(chosen_by, ends=tuple(end - span.start for end in ends if end in inside))
        if arm.selector == WHOLE:
            return Summary(torch.arange(span.tokens).expand(1, *memory.keys.shape[:2], -1)), judged_by
        budgets = replace(self.budgets, page_blocks=self.page_blocks) if arm.int4 else self.budgets
        counts = budgets.counts(arm.entries, span.tokens, PAGE_SIZE)
        options = self.budgets.options(arm.selector) | (self.options if arm.selector == OWN else {})
        selector = selectors.create(arm.selector, **options)
        return selector.select(chosen_by, torch.tensor(counts).view(memory.keys.shape[:2])), judged_by


def judges(memory: Memory, span: Span, now: int, prompt: int, inv_freq: Tensor) -> tuple[Segments, Segments]:
    """A span with the queries that choose, and with those held out for the gate, as `runner.folder` takes them."""
    row = BatchRow(0, [0] * now, False, 0, 0, [], keep_queries=True, queries_from=prompt)
    layers, heads, group, _, dim = memory.queries.shape
    kept, _ = QueryStore(1, layers, heads * group, dim, torch.float32, torch.device("cpu")).place([row])
    seen, past, turns, held = FoldQueries.of(kept, span.end)
    known, judged = (_segments(memory, span, now, positions) for positions in (seen, held))
    if past:
        future = rotate(memory.queries[:, :, :, past], torch.tensor(turns), inv_freq)
        rows = future.transpose(2, 3).flatten(2, 3)[None]
        known = replace(known, queries=torch.cat((known.queries, rows), 3))
    return known, judged


def _segments(memory: Memory, span: Span, now: int, late: list[int]) -> Segments:
    rows = memory.queries[:, :, :, late].transpose(2, 3).flatten(2, 3)
    group, scale = memory.queries.shape[2], memory.queries.shape[-1] ** -0.5
    past = memory.held(now)
    at = memory.raw[:now].nonzero()[:, 0]
    at = torch.cat((at, torch.full((past.bias.shape[-1] - len(at),), -1)))  # summaries are seen by all
    hidden = at > torch.tensor(late).repeat_interleave(group).unsqueeze(-1)
    logits = rows @ past.keys.transpose(-1, -2) * scale + past.bias.unsqueeze(-2)
    lse = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
    raw = slice(span.start, span.end)
    keys, values = memory.keys[None, :, :, raw], memory.values[None, :, :, raw]
    return Segments(keys, values, rows[None], lse[None], late=len(late), group=group, scale=scale)


def compare(full: Reading, folded: Reading, output: Sequence[int]) -> dict[str, float]:
    """The metrics of one trace."""
    wrote = torch.tensor(output)[:, None]
    lost = full.logprobs.gather(1, wrote) - folded.logprobs.gather(1, wrote)
    return {
        "dnll": lost.mean().item(),
        "kl": kl_div(folded.logprobs, full.logprobs, reduction="batchmean", log_target=True).item(),
        "changed_share": (folded.logprobs.argmax(-1) != full.logprobs.argmax(-1)).float().mean().item(),
        "kv_mean_ratio": folded.mean / full.mean,
        "kv_peak_ratio": folded.peak / full.peak,
        "error_mean": fmean(folded.errors) if folded.errors else 0.0,
        "error_max": max(folded.errors, default=0.0),
        "folds": len(folded.errors),
    }


def all_arms(
    names: Sequence[str], entries: Sequence[int], times: Sequence[str], limit: float | None, *, int4: bool = False
) -> list[Arm]:
    """Every selector at every time and size (`drop` at none), with `int4` again in 4 bits and once with everything,
    and with `limit` again under the gate."""
    arms = []
    for name, time_, size in product(names, times, entries):
        arm = Arm(name, time_ == "late", 0 if name == "drop" else size)
        arms += [arm] if not int4 or name == "drop" else [arm, replace(arm, int4=True)]
    arms += [Arm(WHOLE, time_ == "late", 0, int4=True) for time_ in times if int4]
    gated = [[arm] if limit is None else [arm, replace(arm, gate=limit)] for arm in arms]
    return list(dict.fromkeys(chain.from_iterable(gated)))


def measure(
    reader: Reader, traces: Sequence[Trace], arms: Sequence[Arm]
) -> Iterator[tuple[Arm, list[dict[str, float]]]]:
    """The metrics of every trace, arm by arm."""
    family = load_language(EngineConfig(model="pebble")).family
    assert family is not None
    cut = [cuts(family, trace, FOLD_PROFILES[reader.profile]) for trace in traces]
    full = [reader.read(trace, *where, None) for trace, where in zip(traces, cut, strict=True)]
    for arm in tqdm(arms, unit="arm", file=sys.stderr):
        found = []
        for trace, where, reference in zip(traces, cut, full, strict=True):
            found.append(compare(reference, reader.read(trace, *where, arm), trace.output))
        yield arm, found


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arms, print and keep their rows."""
    words = sys.argv[1:] if argv is None else argv
    if any(word.startswith("--model") for word in words):
        return bench.load(Path(__file__).with_name("fold_heads.py")).main(words)
    args = parse(words)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    traces = take_traces(args)
    reader = pebble_reader(args)
    started = time.perf_counter()
    arms = all_arms(args.selector, args.entries, args.time, args.gate, int4=args.storage == "int4")
    for arm, found in measure(reader, traces, arms):
        metrics = {"n": len(found), **{name: fmean(one[name] for one in found) for name in found[0]}}
        versions = {"profile": args.profile, "table": "calibrated" if reader.budgets.calibrated else "uniform"}
        row = rows.make_row("fold", f"{args.suite}/{arm.case}", metrics, seed=args.offset, extra_versions=versions)
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(json.dumps(row) if args.json else f"{arm.case:40} {shown}", flush=True)
        if time.perf_counter() - started > 60 * args.minutes:
            break
    return 0


def take_traces(args: argparse.Namespace) -> list[Trace]:
    """The recorded traces, or new ones, which are recorded where a file is named."""
    if args.traces and args.traces.exists():
        return load(args.traces)[: args.n]
    questions = [question.text for question in suite_questions(args.suite, args.n, args.offset)]
    traces = asyncio.run(write_traces(EngineConfig(model="pebble", fold_policy="off"), questions, args.max_tokens))
    if args.traces:
        save(args.traces, traces)
    return traces


def pebble_reader(args: argparse.Namespace) -> Reader:
    """Pebble in fp32 under a tape, with its own budget table, another, or none."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pebble_path(), dtype=torch.float32).eval()
    shape = (model.config.num_hidden_layers, model.config.num_key_value_heads)
    path = None if args.uniform else args.table or pebble_path() / BUDGETS_FILE
    options = {} if args.conclusion is None else {"conclusion": args.conclusion}
    return Reader(model, use_tape(model), FoldBudgets.load(path, *shape), args.profile, options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench fold", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", choices=list(SUITES), default="long")
    parser.add_argument("-n", type=int, default=8, help="answers that are read")
    parser.add_argument("--offset", type=int, default=OFFSET, help="number of the first problem")
    parser.add_argument("--max-tokens", type=int, help="of an answer (default: up to the model's length)")
    parser.add_argument("--traces", type=Path, help="file of recorded answers: read if it is there, else written")
    parser.add_argument("--selector", nargs="+", choices=selectors.names(), default=selectors.names(), metavar="NAME")
    parser.add_argument("--entries", nargs="+", type=int, default=ENTRIES, metavar="N", help="a head, on average")
    parser.add_argument("--time", nargs="+", choices=["late", "now"], default=["late", "now"])
    parser.add_argument("--gate", type=float, help="run every arm again, folding only below this estimated error")
    parser.add_argument("--storage", choices=["model", "int4"], default="model", help="int4: every arm in 4 bits, too")
    parser.add_argument("--profile", choices=list(FOLD_PROFILES), default="pebble")
    parser.add_argument("--table", type=Path, help="another budget table than Pebble's own")
    parser.add_argument("--uniform", action="store_true", help="the same budget for every head")
    parser.add_argument(
        "--conclusion", type=int, help="tokens that conclusion_attention keeps first (default: its own)"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further arm after this time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
