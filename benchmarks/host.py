"""How much of a processor does a step cost the host, and what do rules that stop thinking add? Without a GPU.

`step/<rows>`: the engine's own core (scheduler, controls, costs, folds, messages) and its runner, which packs each
step as for CUDA graphs; what a graph or a fold would launch is left out, and drawn tokens come from a text. The batch
decodes, one step ahead, all rows think, and their segments are folded. `control/<rows>`: the client reads the news of
so many requests, with the rules of a preset and without. A message holds four steps, as those of a core that tells all
20 ms. Times are of the processor, in ms a step; medians, and tenth percentiles (`p10`), which other work on the machine
changes least.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import pickle
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from thinkfold.cli import rows
from thinkfold.config import EngineConfig
from thinkfold.control.parts import PartControl
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.branch_controls import make_control
from thinkfold.engine.build import wire_core
from thinkfold.engine.commands import Answer, Probe
from thinkfold.engine.language import Language, load_language
from thinkfold.engine.messages import Command, EngineStats, Event, News, Ready
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.ranks import GC_OBJECTS
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.scheduler.output import FoldCommit, FoldPrepare, StepPlan, StepResult
from thinkfold.scheduler.simulation import percentile
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    EngineRequest,
    Preset,
    ProbeResult,
    RequestOutput,
    SamplingParams,
    ThinkingParams,
    TokenStats,
)

CASES = ("step/64", "step/256", "control/256")
STREAMS = 16  # texts that rows take their tokens from
LENGTH = 4096  # tokens of each
PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
PAGES, PAGE_BYTES = 160, 1 << 18  # of a row
AGES = 64  # messages in which all requests of `control` have begun
SETTLE = 8  # turns of the event loop in which all news are read
THREAD_S = 0.005  # in which a thread has compared answers
TELL = 4  # steps between two messages of a core: 20 ms of steps of 5
STATS = TokenStats(-0.1, 0.3, 12.0, 9.0)


class NoLaunch:
    """Stands in for CUDA graphs: a step is packed and nothing is run."""

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def used_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        return None


class NoFolds:
    """Stands in for `Folder`: tables grow, nothing is chosen or written."""

    def __init__(self, tables: SummaryTables, layers: int) -> None:
        self._tables = tables
        self._squares = torch.tensor([[0.0, 1.0]] * layers)

    def prepare(self, work: FoldPrepare, now: int | None) -> Tensor:
        return self._squares

    def commit(self, work: FoldCommit) -> None:
        self._tables.grow(work)

    def drop(self, fold_id: int) -> None:
        return None


class Script:
    """Texts of a thinker: sentences, paragraphs, now and then a word that turns; none repeats itself."""

    def __init__(self, language: Language) -> None:
        self._streams = [self._stream(language, random.Random(seed)) for seed in range(STREAMS)]

    def token(self, seed: int, position: int) -> int:
        return self._streams[seed % STREAMS][(position + 97 * seed) % LENGTH]

    def _stream(self, language: Language, draw: random.Random) -> list[int]:
        ids: list[int] = []
        while len(ids) < LENGTH:
            a, b = draw.randrange(10, 99), draw.randrange(10, 99)
            turn = "Wait, " if draw.random() < 0.05 else ""
            end = "\n\n" if draw.random() < 0.15 else " "
            text = f"{turn}{a} times {b} is {a * b}, so {a * b - b} is left of it.{end}"
            ids += language.tokenizer.encode(text, add_special_tokens=False)
        return ids[:LENGTH]


class PlayedRunner:
    """A runner whose launches do nothing and whose tokens are those of a script. `aside` is time that is no step's."""

    def __init__(self, runner: ModelRunner, script: Script) -> None:
        self._runner = runner
        self._script = script
        self.aside = 0.0

    def launch(self, plan: StepPlan) -> Any:
        pending = self._runner.launch(plan)
        began = time.thread_time()
        tokens = [self._script.token(sample.seed, sample.position) for sample in pending.samples]
        values, count, width = pending.values.clone(), len(tokens), pending.width
        values[:count] = torch.tensor(tokens, dtype=torch.float64)
        values[width : width + 4 * count] = torch.tensor(STATS, dtype=torch.float64).repeat(count)
        pending.values = values
        self.aside += time.thread_time() - began
        return pending

    def collect(self, pending: Any) -> StepResult:
        return self._runner.collect(pending)


class Wire:
    """A client's line to a core: what it sends stays here until somebody takes it."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def stop(self) -> None:
        return None


class Host:
    """Pebble's core without its arithmetic, and the line to it."""

    def __init__(self, batch: int) -> None:
        self.config = config = EngineConfig(
            device="cpu",
            attention_backend="reference",
            max_num_seqs=batch,
            max_num_batched_tokens=512,  # larger steps are not captured
            pipeline_depth=1,
            fold_policy="eager",
            kv_cache_bytes=batch * PAGES * PAGE_BYTES,  # nothing is ever written there
        )
        self.language = language = load_language(config)
        self.script = Script(language)
        family = language.family
        runner = ModelRunner(
            config,
            end_marker_id=family.end_token_id if family else None,
            eos_token_ids=language.vocabulary.eos_ids,
            batch_invariant=False,
            capture=NoLaunch(),
        )
        memory = runner._memory
        memory._folder = NoFolds(memory.tables, runner.num_layers)  # type: ignore[assignment]
        self.runner = PlayedRunner(runner, self.script)
        self.core, self.model = wire_core(config, language, runner, self.runner)
        self.wire = Wire()

    async def client(self) -> AsyncEngine:
        """An engine at the other end of the line."""

        def connect(language: Language, on_event: Callable[[Event], None]) -> Wire:
            on_event(Ready(self.model))
            return self.wire

        return await AsyncEngine.start(self.config, connect=connect)

    def ask(self, engine: AsyncEngine, name: str, seed: int, preset: str | None = None) -> asyncio.Task[None]:
        """A client that thinks for thousands of tokens and reads to the end; rules of `preset` may stop it."""
        prompt = self.language.tokenizer.encode(PROMPT)
        sampling = SamplingParams(max_tokens=8192, seed=seed, temperature=0.6, top_p=0.95)
        thinking, control = ThinkingParams(thinking_token_budget=8000), ControlParams(preset=preset)

        async def read() -> None:
            async for _ in engine.generate(prompt, sampling, thinking, request_id=name, control=control):
                pass

        return asyncio.create_task(read())

    async def requests(self, count: int) -> list[EngineRequest]:
        """What has been asked, when there are so many."""
        while len(self.wire.sent) < count:
            await asyncio.sleep(0)
        sent, self.wire.sent = self.wire.sent, []
        return [request for request in sent if isinstance(request, EngineRequest)]


class Parts:
    """CPU time of a core's steps by who spends it: plan, pack, collect, ledger, and the rest, which are controls."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = {}
        core = host.core
        self._time(core.scheduler, "plan", "plan")
        self._time(host.runner, "launch", "pack")
        self._time(host.runner, "collect", "collect")
        self._time(core._ledger, "collect", "ledger")

    def step(self) -> None:
        """One step, and every few of them a message."""
        core, runner = self._host.core, self._host.runner
        self._spent, runner.aside = {}, 0.0
        began = time.thread_time()
        core.advance()
        spent = self._spent
        step = time.thread_time() - began - runner.aside
        spent["pack"] -= runner.aside
        spent["accept"] = step - sum(spent.values())
        spent["step"] = step
        if len(self._steps) % TELL == 0:
            began = time.thread_time()
            pickle.dumps(News(core.news(), core.stats()))
            self._told = (time.thread_time() - began) / TELL
        spent["tell"] = self._told
        self._steps.append(spent)

    def metrics(self, steps: int) -> dict[str, float]:
        """Of the last steps, in ms."""
        kept = self._steps[-steps:]
        found = {f"{name}_ms": median(one[name] for one in kept) * 1e3 for name in kept[0]}
        whole = [(one["step"] + one["tell"]) * 1e3 for one in kept]
        return {"host_ms": median(whole), "host_mean_ms": fmean(whole), "host_p10_ms": percentile(whole, 0.1), **found}

    def _time(self, owner: Any, name: str, part: str) -> None:
        body = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return body(*args)
            finally:
                self._spent[part] = self._spent.get(part, 0.0) + time.thread_time() - began

        setattr(owner, name, timed)


async def step_case(batch: int, warm: int, steps: int) -> dict[str, float]:
    """A batch that thinks."""
    host = Host(batch)
    engine = await host.client()
    readers = [host.ask(engine, str(seed), seed) for seed in range(batch)]
    for request in await host.requests(batch):
        host.core.add(request)
    parts = Parts(host)
    with quiet_collector():
        for _ in range(warm + steps):
            parts.step()
    host.core.check_integrity()
    stats = host.core.stats()
    for reader in readers:
        reader.cancel()
    await engine.stop()
    return {**parts.metrics(steps), "rows": stats.running, "folds": stats.folds}


async def control_case(batch: int, warm: int, steps: int, preset: str) -> dict[str, float]:
    """The same messages, read with rules and without, in turns."""
    host = Host(2 * batch)
    engine = await host.client()
    arms = ("without", "with")
    names = {arm: [f"{arm}-{seed}" for seed in range(batch)] for arm in arms}
    readers = [
        host.ask(engine, name, seed, preset if arm == "with" else None)
        for arm in arms
        for seed, name in enumerate(names[arm])
    ]
    requests = (await host.requests(2 * batch))[:batch]
    controls = [make_control(host.language, request, 0) for request in requests]
    spent: dict[str, list[float]] = {arm: [] for arm in arms}
    looks = 0
    with quiet_collector():
        for number in range((warm + steps) // TELL):
            begun = controls[: batch * (number + 1) // AGES]  # of every age, so that rules do not all work at once
            outputs = [told(control, host.script, seed, number * TELL) for seed, control in enumerate(begun)]
            for arm in arms if number % 2 else arms[::-1]:
                news = [
                    RequestOutput(name, [output], requests[0].thinking, Costs())
                    for name, output in zip(names[arm], pickle.loads(pickle.dumps(outputs)), strict=False)
                ]
                began = time.process_time()  # answers are compared in threads
                engine._on_event(News(news, EngineStats()))
                looks += await settle(engine, host.wire)
                spent[arm].append((time.process_time() - began) * 1e3 / TELL)
    for reader in readers:
        reader.cancel()
    await engine.stop()
    last = {arm: spent[arm][warm // TELL :] for arm in arms}
    p10 = {arm: percentile(times, 0.1) for arm, times in last.items()}
    return {
        "control_ms": median(last["with"]) - median(last["without"]),
        "control_mean_ms": fmean(last["with"]) - fmean(last["without"]),
        "control_p10_ms": p10["with"] - p10["without"],
        "without_rules_ms": median(last["without"]),
        "looks": looks,
    }


def told(control: PartControl, script: Script, seed: int, position: int) -> CompletionOutput:
    """A choice's news of a message's tokens."""
    for index in range(TELL):
        control.accept(script.token(seed, position + index))
    output = control.snapshot()
    output.stats = [STATS] * TELL
    return output


async def settle(engine: AsyncEngine, wire: Wire) -> int:
    """Let clients and rules read, answer their looks (never the same, never sure), and say how many there were."""
    looks = 0
    for _ in range(SETTLE):
        await asyncio.sleep(0)
        answers = []
        for order in wire.sent:
            assert isinstance(order, Probe), "rules of this text do nothing but look"
            stats = [TokenStats(-1.0, 0.2, 12.0, 9.0)] * order.n
            answers.append(Answer(order.call, ProbeResult([0] * order.n, "", stats, computed_tokens=8 + order.n)))
        wire.sent.clear()
        if answers:
            looks += len(answers)
            engine._on_event(News([], EngineStats(), answers))
            await asyncio.sleep(THREAD_S)
    return looks


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Garbage is collected as in a core's own process."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    """The metrics of `step/64` and alike."""
    kind, _, batch = case.partition("/")
    work = step_case if kind == "step" else partial(control_case, preset=args.preset)
    return asyncio.run(work(int(batch), args.warm, args.steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench host", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", help=f"step/<rows> or control/<rows> (default: {', '.join(CASES)})")
    parser.add_argument("--warm", type=int, default=1024, help="steps before those that count: tokens of thinking")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--preset", default="balanced", choices=list(Preset), help="rules of control/<rows>")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, one a line")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    if unknown := [case for case in args.case or () if not re.fullmatch(r"(step|control)/[1-9][0-9]*", case)]:
        parser.error(f"--case: must be like {CASES[0]}, got {unknown[0]}")
    if not AGES * TELL <= args.warm <= args.warm + args.steps <= LENGTH or args.steps < TELL:
        parser.error(f"--warm: at least {AGES * TELL}, --steps: at least {TELL}, and together at most {LENGTH}")
    torch.set_num_threads(1)
    for case in args.case or CASES:
        row = rows.make_row("host", case, measure(case, args), seed=0)
        if not args.no_record:
            rows.keep(row)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in row["metrics"].items())
        print(json.dumps(row) if args.json else f"{case}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
