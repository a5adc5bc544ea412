"""`thinkfold calibrate`: measure which heads need how many entries, and write the model's budget table for folds."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.fold.budgets import BUDGETS_FILE, FoldBudgets, blend, write
from thinkfold.fold.planner import FoldPlanner
from thinkfold.fold.spans import Span
from thinkfold.pebble import SUITES, pebble_path
from thinkfold.types import FOLD_PROFILES, FoldMode, FoldPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from thinkfold.cli.sensitivity import Text
    from thinkfold.cli.traces import Trace
    from thinkfold.engine.language import Language

OFFSET = 1_000_000  # of the first problem, so that no problem of an eval is among them
FEWEST_TOKENS = 1024  # of a text
FAVOUR = 0.05  # of attention in a table by loss: what a few texts did not ask for, another one may


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `calibrate` to the command line."""
    parser = subparsers.add_parser(
        "calibrate", allow_abbrev=False, help="write a model's budget table for folds", description=__doc__
    )
    parser.add_argument("--model", default="pebble", help="folder or hub id (default: the embedded model)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--texts", type=Path, nargs="+", metavar="FILE", help="plain text, one text a file")
    source.add_argument("--suite", choices=list(SUITES), help="the model's own greedy answers to problems of a suite")
    parser.add_argument("--traces", type=Path, help="file of recorded answers: read if it is there, else written")
    parser.add_argument("-n", type=int, default=8, help="problems of the suite (default: 8)")
    parser.add_argument("--offset", type=int, default=OFFSET, help=f"number of the first problem (default: {OFFSET})")
    parser.add_argument("--profile", choices=list(FOLD_PROFILES), help="numbers of segments and folds")
    parser.add_argument("--entries", type=int, help="entries a head for which all compete (default: the profile's)")
    parser.add_argument(
        "--conclusion", type=int, help="tokens that every head keeps first (default: 16 if the model thinks, else 0)"
    )
    parser.add_argument(
        "--by",
        choices=["error", "loss", "attention"],
        help="what a head's need is: how wrong its output gets, weighed by what that does to the loss (default for "
        "--texts), what the loss falls by when it gets back what folds took (default for answers), or attention",
    )
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a text or an answer (default: 8192)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, required=True, help=f"file to write; the engine looks for {BUDGETS_FILE}")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Sample:
    """One text as token ids, and the spans of it that would be folded."""

    ids: list[int]
    spans: list[Span]


def run(args: argparse.Namespace) -> int:
    """Read texts or write answers, measure, and write the table. Raises ThinkfoldError."""
    from thinkfold.engine.language import load_language
    from thinkfold.fold.compaction import CONCLUSION

    profile = args.profile or ("pebble" if args.model == "pebble" else "default")
    entries = FOLD_PROFILES[profile].entries if args.entries is None else args.entries
    policy = FoldPolicy(policy=FoldMode.EAGER, profile=profile, entries=entries)
    language = load_language(_config(args))
    if args.conclusion is None:
        args.conclusion = CONCLUSION if language.family else 0
    args.by = args.by or ("error" if args.texts else "loss")
    _check(args, entries, policy)
    samples = _texts(args, policy) if args.texts else _answers(args, policy, language)
    if not any(sample.spans for sample in samples):
        raise ParameterError("texts" if args.texts else "suite", "nothing in it is long enough to be folded")
    table = weigh(args, samples, entries)
    origin = {
        "model": Path(args.model).name,
        "calibrated_on": _source(args),
        "by": args.by,
        "folds": table.folds,
        "entries": entries,
    }
    write(args.out, table.weights, args.conclusion, table.mass, origin)
    FoldBudgets.load(args.out, len(table.weights), len(table.weights[0]))
    least, most = min(map(min, table.weights)), max(map(max, table.weights))
    pooled = sum(map(sum, table.mass))
    print(
        f"{args.out}: {table.folds} folds; shares of heads from {least:.2f} to {most:.2f} of the mean, "
        f"{pooled} heads with a pooled entry",
        file=sys.stderr,
    )
    return 0


@dataclass(frozen=True, slots=True)
class Table:
    """What heads get `[layers][kv_heads]`, the number of spans, and who has pooled entries (empty: none)."""

    weights: list[list[float]]
    folds: int
    mass: list[list[int]] = field(default_factory=list)


def weigh(args: argparse.Namespace, samples: Sequence[Sample], entries: int) -> Table:
    """A table for all heads.

    By error: the table whose errors add up to the least (`error_budget`).
    By loss: what the loss falls by when a head that keeps only conclusions gets its tokens back, and a share of
    `FAVOUR` by attention. Attention alone says where a head looks, not whether anything hangs on it; the loss alone
    says 0 of a head that no text at hand has tried.
    """
    from thinkfold.cli.error_budget import error_budget
    from thinkfold.cli.sensitivity import search

    model, inv_freq = _load(args)
    if args.by == "error":
        return Table(*error_budget(model, inv_freq, samples, entries, args.conclusion))
    counts, texts = survey(model, inv_freq, samples, entries, args.conclusion)
    folds = sum(len(text.spans) for text in texts)
    if args.by == "attention":
        return Table(counts, folds)
    needs = search(model, texts, args.conclusion)
    weights = blend(needs.relief.tolist(), counts, FAVOUR)
    return Table(weights, folds, needs.mass.int().tolist() if needs.mass.any() else [])


def survey(
    model: Any, inv_freq: Tensor, samples: Sequence[Sample], entries: int, conclusion: int
) -> tuple[list[list[float]], list[Text]]:
    """What the heads win `[layers][kv_heads]` when all compete for each span, mean 1.

    And the samples with the pooled entry that could stand in each head for what a span loses beside its conclusion.
    """
    import torch
    from tqdm import tqdm

    from thinkfold.cli.capture import read, use_tape
    from thinkfold.cli.error_budget import cut
    from thinkfold.cli.sensitivity import Text
    from thinkfold.fold.compaction import choose, global_counts, importance, segment_share, uniform_budget
    from thinkfold.fold.fit import remainder
    from thinkfold.fold.segments import Entries

    tape, won, texts = use_tape(model), torch.zeros(()), []
    for sample in tqdm(samples, unit="text", file=sys.stderr):
        record, pooled = read(model, tape, sample.ids), []
        layers, heads = record.keys.shape[:2]
        for span in sample.spans:
            segments = cut(record, span, inv_freq)
            size = min(entries, span.tokens)
            first = min(conclusion, size)
            scores = importance(segments)
            counts = global_counts(scores, segment_share(segments), size, first)[0]
            won = won + (counts - first).cpu()
            exact = choose(scores, uniform_budget(layers, heads, first), conclusion, span.ends)
            pooled.append(remainder(segments, exact, uniform_budget(layers, heads, 1)))
        if pooled:
            parts = (torch.cat([getattr(p, name)[0] for p in pooled], 2) for name in ("keys", "values", "bias"))
            texts.append(Text(sample.ids, sample.spans, Entries(*parts)))
    mean = won.double().mean().clamp(min=1e-9)
    return (won / mean).tolist(), texts


def _load(args: argparse.Namespace) -> tuple[Any, Tensor]:
    """The model as transformers makes it, without the engine's own layers, and the frequencies of its rope."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from thinkfold.runner.loader import check_supported, pick_device

    device = pick_device(args.device)
    source = pebble_path() if args.model == "pebble" else args.model
    dtype = "float32" if args.dtype == "auto" and device.type == "cpu" else args.dtype
    try:
        config = AutoConfig.from_pretrained(source)
        check_supported(config)
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
    except (OSError, KeyError) as error:
        raise ParameterError("model", f"cannot load {args.model!r}: {error}") from error
    inv_freq = getattr(getattr(model.base_model, "rotary_emb", None), "inv_freq", None)
    if not isinstance(inv_freq, torch.Tensor):
        raise UnsupportedError("model", "its queries cannot be turned ahead: its rope is not the plain one")
    return model.eval().requires_grad_(False).to(device), inv_freq.to(device)  # type: ignore[arg-type]


def _texts(args: argparse.Namespace, policy: FoldPolicy) -> list[Sample]:
    """Files as samples: stretches of the longest segment are cut behind the first page."""
    from thinkfold.runner.loader import load_tokenizer

    tokenizer, _, _ = load_tokenizer(_config(args))
    samples = []
    for path in args.texts:
        try:
            ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"][: args.max_tokens]
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError("texts", f"cannot read {path.name}: {error}") from error
        if len(ids) < FEWEST_TOKENS:
            raise ParameterError("texts", f"{path.name} has {len(ids)} tokens, {FEWEST_TOKENS} are needed")
        size = policy.numbers.max_segment_tokens
        samples.append(Sample(ids, _spans(policy, 1, range(size, len(ids), size))))
    return samples


def _answers(args: argparse.Namespace, policy: FoldPolicy, language: Language) -> list[Sample]:
    """The model's own greedy answers as samples, new or recorded."""
    from thinkfold.cli.traces import cuts

    if language.family is None:
        raise UnsupportedError("model", "it does not think: give --texts")
    samples = []
    for trace in _traces(args, language):
        ends, _ = cuts(language.family, trace, policy.numbers)
        samples.append(Sample(trace.prompt + trace.output, _spans(policy, len(trace.prompt), ends)))
    return samples


def _traces(args: argparse.Namespace, language: Language) -> list[Trace]:
    """Answers to the problems, of `max_tokens` at most; new ones are recorded where a file is named."""
    from thinkfold.cli import traces
    from thinkfold.cli.evaluation import suite_questions
    from thinkfold.text.prompts import PromptRenderer

    config = _config(args)
    questions = [question.text for question in suite_questions(_suite(args), args.n, args.offset)]
    if not args.traces or not args.traces.exists():
        written = asyncio.run(traces.write_traces(config, questions, args.max_tokens))
        if args.traces:
            traces.save(args.traces, written)
        return written
    prompts = PromptRenderer(language.tokenizer, normalize=config.normalize_prompts, markers=language.markers)
    recorded = traces.load(args.traces)[: args.n]
    if [t.prompt for t in recorded] != [prompts.encode_chat([{"role": "user", "content": q}]) for q in questions]:
        where = f"{args.n} problems of {_suite(args)} from {args.offset} on"
        raise ParameterError("traces", f"{args.traces.name} does not hold the answers to {where}")
    return [traces.Trace(trace.prompt, trace.output[: args.max_tokens]) for trace in recorded]


def _spans(policy: FoldPolicy, prompt_tokens: int, ends: Sequence[int]) -> list[Span]:
    """What the engine would fold of a text with segments that end there."""
    planner = FoldPlanner(policy, EngineConfig().page_size, prompt_tokens)
    planner.observe(ends, None)
    return planner.spans


def _config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(model=args.model, device=args.device, dtype=args.dtype, fold_policy="off")


def _suite(args: argparse.Namespace) -> str:
    return args.suite or "long"


def _source(args: argparse.Namespace) -> str:
    """What the table is made from."""
    if args.texts:
        return f"{len(args.texts)} texts, {args.max_tokens} tokens of each at most"
    return f"{args.n} answers to {_suite(args)} from problem {args.offset} on, {args.max_tokens} tokens of each at most"


def _check(args: argparse.Namespace, entries: int, policy: FoldPolicy) -> None:
    shortest = policy.numbers.min_segment_tokens
    for name, value, low, high in (
        ("n", args.n, 1, 10_000),
        ("offset", args.offset, 0, 2**31),
        ("entries", entries, 1, shortest - 1),
        ("conclusion", args.conclusion, 0, entries - 1),
        ("max_tokens", args.max_tokens, FEWEST_TOKENS, 2**20),
    ):
        if not low <= value <= high:
            raise ParameterError(name, f"must be in [{low}, {high}], got {value}")
    if args.traces and args.texts:
        raise ParameterError("traces", "they are answers, and --texts takes plain text instead")
    if not args.out.parent.is_dir():
        raise ParameterError("out", f"there is no folder {args.out.parent}")
