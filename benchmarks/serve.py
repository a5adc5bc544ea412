"""How fast does the engine decode on this machine's CPU, against transformers' own generation?

Both sides: same weights, computed with in fp32 (ours reads those of a bf16 checkpoint in 16 bits, which loses nothing),
same prompts, greedy, forced lengths, and at most the same threads (ours takes fewer where fewer are faster). Each side
lives in a process of its own, which sleeps while another one works. Each is warmed up; then the sides take turns and
the median run counts. Work is counted in output tokens that were asked for, so padding earns nothing.

The peer of a case is the faster of `generate_batch` (transformers' continuous batching, at most 16 at a time, its
manager started before the clock) and padded `generate` (batches of 16 in order of arrival); one stream is `generate`.
Prefix caching is off on our side, since every run repeats its prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from thinkfold import AsyncEngine, EngineConfig, SamplingParams, ThinkingParams
from thinkfold.cli import rows
from thinkfold.llm import collect
from thinkfold.pebble import pebble_path, problems
from thinkfold.text.prompts import PromptRenderer

PAGE_SIZE = 32  # of our KV; on a CPU larger pages are gathered faster than the default of 16
AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Work:
    """One request: prompt ids and the number of tokens to generate."""

    prompt: list[int]
    length: int


class Side(Protocol):
    """Something that does work; `run` returns the seconds that it took."""

    name: str

    def run(self, work: Sequence[Work]) -> float: ...

    def close(self) -> None: ...


class Thinkfold:
    """Our engine in this process, one task a request."""

    name = "thinkfold"

    def __init__(self, model: str, at_a_time: int) -> None:
        self._runner = asyncio.Runner()
        config = EngineConfig(
            model=model,
            device="cpu",
            dtype="float32",
            max_num_seqs=at_a_time,
            enable_prefix_caching=False,
            page_size=PAGE_SIZE,
        )
        self._engine = self._runner.run(AsyncEngine.start(config))

    def run(self, work: Sequence[Work]) -> float:
        async def everything() -> list[int]:
            outputs = await asyncio.gather(*(self._one(item) for item in work))
            return [output.outputs[0].num_output_tokens for output in outputs]

        started = time.perf_counter()
        produced = self._runner.run(everything())
        seconds = time.perf_counter() - started
        check_lengths(self.name, produced, work)
        return seconds

    async def _one(self, item: Work) -> Any:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.length)
        return await collect(self._engine, item.prompt, sampling, ThinkingParams(thinking_token_budget=-1))

    def close(self) -> None:
        self._runner.run(self._engine.stop())
        self._runner.close()


class PaddedGenerate:
    """`model.generate` over left-padded batches; a batch runs to its longest request."""

    name = "generate"

    def __init__(self, model: str, at_a_time: int) -> None:
        self._model = load_peer(model)
        self._at_a_time = at_a_time

    def run(self, work: Sequence[Work]) -> float:
        started = time.perf_counter()
        for start in range(0, len(work), self._at_a_time):
            batch = work[start : start + self._at_a_time]
            width = max(len(item.prompt) for item in batch)
            ids = torch.tensor([[0] * (width - len(item.prompt)) + item.prompt for item in batch])
            mask = torch.tensor([[0] * (width - len(item.prompt)) + [1] * len(item.prompt) for item in batch])
            longest = max(item.length for item in batch)
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
            check_lengths(self.name, [out.shape[1] - width], [max(batch, key=lambda item: item.length)])
        return time.perf_counter() - started

    def close(self) -> None:
        return


class GenerateBatch:
    """transformers' continuous batching, through the manager that `generate_batch` uses.

    Its manager polls while it has nothing to do, so it lives only as long as a run.
    """

    name = "generate_batch"

    def __init__(self, model: str, at_a_time: int) -> None:
        self._model = load_peer(model)
        self._at_a_time = at_a_time

    def run(self, work: Sequence[Work]) -> float:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(len(item.prompt) + item.length for item in work)
        pages = self._at_a_time * -(-longest // 256) + 8  # of 256 tokens, its default: every request fits
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=pages, max_requests_per_batch=self._at_a_time
            ),
        )
        manager.start()
        try:
            self._finish(manager, [Work(work[0].prompt, 1)])  # it is up
            started = time.perf_counter()
            self._finish(manager, work)
            return time.perf_counter() - started
        finally:
            manager.stop(block=True)

    def _finish(self, manager: Any, work: Sequence[Work]) -> None:
        wanted = {manager.add_request(item.prompt, max_new_tokens=item.length, eos_token_id=-1): item for item in work}
        for _ in work:
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise SystemExit(f"generate_batch failed: {result.error if result else 'no result'}")
            check_lengths(self.name, [len(result.generated_tokens)], [wanted[result.request_id]])

    def close(self) -> None:
        return


SIDES = {side.name: side for side in (Thinkfold, PaddedGenerate, GenerateBatch)}


class Isolated:
    """A side in a process of its own that speaks JSON lines: work in, seconds out."""

    def __init__(self, name: str, model: str, at_a_time: int, threads: int) -> None:
        self.name = name
        command = [sys.executable, __file__, "--side", name, "--model", model]
        command += ["--threads", str(threads), "--at-a-time", str(at_a_time)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, work: Sequence[Work]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(item) for item in work]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return float(json.loads(line)["seconds"])
        raise SystemExit(f"{self.name} ended early (exit code {self._process.wait()})")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def work_for_parent(args: argparse.Namespace) -> int:
    """Be one side: read work from standard input until it ends."""
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    side: Side = SIDES[args.side](args.model, args.at_a_time)
    for line in sys.stdin:
        seconds = side.run([Work(**item) for item in json.loads(line)])
        print(json.dumps({"seconds": seconds}), flush=True)
    side.close()
    return 0


def check_lengths(name: str, produced: Sequence[int], work: Sequence[Work]) -> None:
    """Equal work, or no number."""
    for got, item in zip(produced, work, strict=True):
        if got != item.length:
            raise SystemExit(f"{name} made {got} tokens where {item.length} were asked for")


def load_peer(folder: str) -> Any:
    """The same weights in fp32 with sdpa, and no token that ends a response early."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def spread(count: int, low: int, high: int, seed: int) -> list[int]:
    """`count` lengths from `low` to `high`, evenly spaced in the logarithm, shuffled."""
    lengths = [round(low * (high / low) ** (i / (count - 1))) for i in range(count)]
    Random(seed).shuffle(lengths)
    return lengths


def time_sides(sides: Sequence[Side], work: Sequence[Work], runs: int) -> dict[str, float]:
    """Median output tokens per second of each side; sides take turns."""
    tokens = sum(item.length for item in work)
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.run([Work(item.prompt, 8) for item in work[:AT_A_TIME]])
    for _ in range(runs):
        for side in sides:
            rates[side.name].append(tokens / side.run(work))
            print(f"  {side.name:15} {rates[side.name][-1]:8.1f} tokens/s", file=sys.stderr)
    return {name: statistics.median(values) for name, values in rates.items()}


def measure(case: str, lengths: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Run one case and return its row."""
    print(f"{case}: {len(lengths)} requests of {min(lengths)} to {max(lengths)} tokens", file=sys.stderr)
    at_a_time = min(AT_A_TIME, len(lengths))
    renderer = PromptRenderer(AutoTokenizer.from_pretrained(args.model), normalize=True)
    questions = [problem.question for problem in problems("medium", len(lengths))]
    prompts = [renderer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    work = [Work(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    names = list(SIDES) if len(work) > 1 else ["thinkfold", "generate"]
    sides = [Isolated(name, args.model, at_a_time, args.threads) for name in names]
    try:
        rates = time_sides(sides, work, args.runs)
    finally:
        for side in sides:
            side.close()
    own = rates.pop(Thinkfold.name)
    peer = max(rates, key=rates.__getitem__)
    metrics = {"output_tokens_per_s": own, "peer_output_tokens_per_s": rates[peer], "ratio": own / rates[peer]}
    metrics |= {f"{name}_output_tokens_per_s": rate for name, rate in rates.items()}
    versions = {"peer": f"transformers {peer}", "threads": str(args.threads), "page_size": str(PAGE_SIZE)}
    return rows.make_row("serve", case, metrics, seed=args.seed, extra_versions=versions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print and keep their rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", help="one of the cases; may be repeated (default: all)")
    parser.add_argument("--model", default=str(pebble_path()), help="a model folder (default: the embedded model)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        return work_for_parent(args)
    cases = {"16_spread": spread(32, 64, 512, args.seed), "16_fixed": [256] * 16, "1_stream": [256]}
    chosen = args.case or list(cases)
    if unknown := set(chosen) - set(cases):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    for case in chosen:
        row = measure(case, cases[case], args)
        if not args.no_record:
            rows.keep(row)
        numbers = row["metrics"]
        print(
            json.dumps(row)
            if args.json
            else f"{case:10} {numbers['output_tokens_per_s']:8.1f} tokens/s, {row['versions']['peer']} "
            f"{numbers['peer_output_tokens_per_s']:8.1f}, ratio {numbers['ratio']:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
