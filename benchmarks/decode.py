"""How long does an engine step of a decoding batch take, and how far is it from the bytes that it must read?

The whole core runs: scheduler, control, sampler, statistics, the copy home and the messages to a client, which are
pickled as for another process. Prompts are not computed: keys and values are random numbers from the start, and so are
weights where only a configuration is known, because only speed is asked for. `step_ms` is the mean gap between the ends
of steps, `host_ms` the part of it in which the host did not wait for the device. `floor_ms` are the weights that a step
reads and the batch's keys and values, once each, over a copy's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import pickle
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import torch

from thinkfold import EngineConfig, SamplingParams
from thinkfold.attention.fp8 import FP8
from thinkfold.cli import rows
from thinkfold.control.parts import PartControl
from thinkfold.engine.core import EngineCore
from thinkfold.engine.loop import run_core
from thinkfold.engine.messages import Command, Event, ModelInfo, Stop
from thinkfold.errors import ParameterError
from thinkfold.kv.manager import KVManager
from thinkfold.runner import loader
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.shapes import SHAPES
from thinkfold.runner.storage import page_bytes
from thinkfold.scheduler.output import StepPlan, StepResult
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.types import EngineRequest, Phase, PromptState, ThinkingPolicy, TokenStats

BATCHES = "32x4k,16x16k,64x1k,1x32k"
WARM = 16  # steps before the clock starts
COPY_BYTES = 2 << 30
SAMPLED: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95}


class FilledRunner:
    """A runner whose prompts are there already: steps that still hold one cost nothing and draw token 0."""

    def __init__(self, runner: ModelRunner, batch: int) -> None:
        self._runner = runner
        self._batch = batch
        self.waited = 0.0
        self.collected = 0  # steps of the whole batch

    def launch(self, plan: StepPlan) -> Any:
        decoding = len(plan.rows) == self._batch == plan.num_tokens
        return self._runner.launch(plan) if decoding else plan

    def collect(self, pending: Any) -> StepResult:
        if isinstance(pending, StepPlan):
            count = sum(len(row.samples) for row in pending.rows)
            return StepResult(pending.step, [0] * count, [TokenStats(0.0, 0.0, 0.0, 0.0)] * count, [None] * count)
        started = time.perf_counter()
        if pending.ready is not None:
            pending.ready.synchronize()
        self.waited += time.perf_counter() - started
        self.collected += 1
        return self._runner.collect(pending)


class TimedCore:
    """A core that notes the end of each step and what it had waited for the device until then."""

    def __init__(self, core: EngineCore, runner: FilledRunner) -> None:
        self._core = core
        self._runner = runner
        self.ends: list[tuple[float, float]] = []  # of whole steps: seconds, seconds waited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def advance(self) -> None:
        before = self._runner.collected
        self._core.advance()
        if self._runner.collected > before:
            self.ends.append((time.perf_counter(), self._runner.waited))


def make_core(config: EngineConfig, loaded: LoadedModel, batch: int) -> TimedCore:
    """The engine's core on a filled KV memory; there is no tokenizer, each token is one letter."""
    runner = ModelRunner(config, loaded=loaded)
    storage = runner._memory.storage
    for page in storage.tensor.split(256):
        page.copy_(torch.randn(page.shape, device=page.device, dtype=torch.bfloat16))
    storage.scales.fill_(0.01)
    vocabulary = Vocabulary((b"a",) * loaded.vocab_size, frozenset(), frozenset())
    kv = KVManager(runner.num_pages, config.page_size, enable_prefix_caching=False)
    scheduler = Scheduler(kv, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)
    filled = FilledRunner(runner, batch)
    depth = config.pipeline_depth if config.pipeline_depth is not None else int(loaded.device.type == "cuda")
    core = EngineCore(
        filled,
        scheduler,
        lambda request, branch: PartControl(request, branch, vocabulary, None),
        page_bytes=runner.page_bytes,
        pipeline_depth=depth,
    )
    return TimedCore(core, filled)


def measure(config: EngineConfig, loaded: LoadedModel, batch: int, entries: int, steps: int, sampled: bool) -> Any:
    """Times of one batch: mean gap of steps, its middle and 99th percentile, and the host's share, in ms."""
    core = make_core(config, loaded, batch)
    inbox: queue.Queue[Command] = queue.Queue()
    stagger = batch * entries // config.max_num_batched_tokens + 4  # steps until the last prompt is through
    tokens = stagger + WARM + steps
    for i in range(batch):
        params = SamplingParams(
            **(SAMPLED if sampled else {"temperature": 0.0, "forced_tokens": tuple(range(tokens))}),
            max_tokens=tokens,
            seed=i,
            ignore_eos=True,
        )
        prompt, state = (0,) * max(1, entries - WARM - steps // 2), PromptState(Phase.ANSWER, 0, 0)
        inbox.put(EngineRequest(str(i), prompt, state, params, ThinkingPolicy(False, 0, "no_thinking_model")))

    class Inbox:
        """Ends the loop when all is answered."""

        def get(self, block: bool = True, timeout: float | None = None) -> Command:
            if block and inbox.empty():
                return Stop()
            return inbox.get(False)

    last: list[Event] = []

    def send(event: Event) -> None:
        pickle.dumps(event)
        last[:] = [event]

    run_core(lambda _: (cast(EngineCore, core), cast(ModelInfo, None)), config, Inbox(), send)
    full = core.ends[WARM : WARM + steps + 1]
    if len(full) <= steps:
        raise SystemExit(f"only {len(full)} full steps: {last[0]}")
    gaps = sorted(b[0] - a[0] for a, b in pairwise(full))
    waits = [b[1] - a[1] for a, b in pairwise(full)]
    return {
        "step_ms": fmean(gaps) * 1000,
        "step_p50_ms": median(gaps) * 1000,
        "step_p99_ms": gaps[int(len(gaps) * 0.99)] * 1000,
        "host_ms": (fmean(gaps) - fmean(waits)) * 1000,
    }


def floor_bytes(loaded: LoadedModel, batch: int, entries: int, kv_bytes: float) -> float:
    """Weights that a step reads, keys and values. A table of embeddings counts where it is the output layer, too."""
    model = loaded.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel() * loaded.dtype.itemsize  # type: ignore[union-attr]
    return weights + batch * entries * kv_bytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written in a second by a copy on the device."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES >> 4
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - started) / 4)
    return 2 * size / best


def parse_shape(text: str) -> tuple[int, int]:
    """Rows and entries of `32x4k`. Raises ParameterError."""
    batch, _, entries = text.partition("x")
    try:
        thousands = entries.endswith("k")
        return int(batch), int(entries.removesuffix("k")) * (1024 if thousands else 1)
    except ValueError as error:
        raise ParameterError("shapes", f"must be like 32x4k, got {text!r}") from error


def base_config(args: argparse.Namespace, folder: str) -> EngineConfig:
    """What all shapes share. Writes the configuration of `7b` to `folder`."""
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES["7b"]))
    seven = args.model == "7b"
    return EngineConfig(
        model=folder if seven else args.model,
        load_format="dummy" if seven else "auto",
        device=args.device,
        page_size=args.page_size,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=False,
        enforce_eager=args.enforce_eager,
    )


def token_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of one entry in all layers and heads, scales included."""
    dtype = FP8 if config.kv_cache_dtype == "fp8_e4m3" else loaded.dtype
    return page_bytes(loaded.num_layers, loaded.num_kv_heads, 1, loaded.head_dim, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the copy, then every shape; print and keep the rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench decode", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="7b", help="7b (random weights), or a model that can be loaded")
    parser.add_argument("--shapes", default=BATCHES, help="rows x entries, with commas (default: %(default)s)")
    parser.add_argument("--sampled", action="store_true", help="T = 0.6, top_p = 0.95 instead of forced tokens")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--kv-cache-dtype", choices=("model", "fp8_e4m3"), default="model")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    shapes = {text: parse_shape(text) for text in args.shapes.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        base = base_config(args, folder)
        loaded = loader.load(base)
        bandwidth = copy_bandwidth(loaded.device)
        for text, (batch, entries) in shapes.items():
            pages = batch * -(-(entries + 2 * args.steps + 4 * WARM) // args.page_size)
            config = replace(
                base,
                max_num_seqs=batch,
                max_num_batched_tokens=max(8192, batch),
                # A page has a β plane, too, where there are graphs: 4 bytes beside 2 x head_dim numbers.
                kv_cache_bytes=(pages + 1) * args.page_size * token_bytes(base, loaded) * 17 // 16,
            )
            report(args, config, loaded, text, (batch, entries), bandwidth)
    return 0


def report(
    args: argparse.Namespace,
    config: EngineConfig,
    loaded: LoadedModel,
    text: str,
    shape: tuple[int, int],
    bandwidth: float,
) -> None:
    """Measure one shape, print its row and keep it."""
    times = measure(config, loaded, *shape, args.steps, args.sampled)
    metrics, device = dict(times), loaded.device.type
    if device == "cuda":  # on a CPU weights are packed otherwise
        floor = floor_bytes(loaded, *shape, token_bytes(config, loaded)) / bandwidth * 1000
        metrics |= {
            "floor_ms": floor,
            "share_of_floor": floor / times["step_ms"],
            "copy_tb_per_s": bandwidth / 1e12,
        }
    marks = (
        ("/fp8" * (args.kv_cache_dtype == "fp8_e4m3")) + ("/sampled" * args.sampled) + ("/eager" * args.enforce_eager)
    )
    more = {"triton": version("triton")} if device == "cuda" else {}
    row = rows.make_row("decode", f"{args.model}/{text}{marks}", metrics, seed=0, device=device, extra_versions=more)
    if not args.no_record:
        rows.keep(row)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    print(json.dumps(row) if args.json else f"{row['case']}: {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
