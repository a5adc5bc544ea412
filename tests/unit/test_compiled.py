"""The compiled model: one compile for every shape of step, equal to the model itself, and no copy of the KV."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_steps import Repeats, prompt, row
from fold_branch import Branch, Places, feed, fold
from tiny_qwen3 import tiny_qwen3

from thinkfold.config import EngineConfig
from thinkfold.runner import loader
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.output import BatchRow, MemoryWork, StepPlan, StepResult

PAGE = 8


class Counts:
    """A backend that runs what it is given and counts how often it is asked."""

    def __init__(self, spoil: float = 0.0) -> None:
        self.compiles = self.products = 0
        self.spoil = spoil

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiles += 1
        self.products = sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes)
        return lambda *args: [out + self.spoil for out in graph(*args)]


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        page_size=PAGE,
        kv_cache_bytes=1 << 21,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_qwen3(eos_token_id=2).save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The model as a GPU runs it: without the layers for CPUs."""
    monkeypatch.setattr(loader.cpu_fusion, "fuse", lambda _: 0)
    monkeypatch.setattr(loader.cpu_layers, "speed_up", lambda _: None)
    return loader.load(config_of(folder))


def build(folder: Path, loaded: LoadedModel, compiler: Any = None, **config: Any) -> ModelRunner:
    options: dict[str, Any] = {"loaded": loaded, "batch_invariant": False}
    return ModelRunner(config_of(folder, **config), **options, capture=Repeats(), compiler=compiler)


def run(runner: ModelRunner, *rows: BatchRow) -> StepResult:
    return runner.collect(runner.launch(StepPlan(0, list(rows), MemoryWork())))


def same(mine: StepResult, other: StepResult) -> None:
    assert mine.token_ids == other.token_ids
    for a, b in zip(mine.stats, other.stats, strict=True):
        assert (a.logprob, a.entropy) == pytest.approx((b.logprob, b.entropy), abs=1e-4)


def drive(runner: ModelRunner) -> list[StepResult]:
    """Prompts alone and together, one too large for a graph, decode steps of 1 to 8 rows, and folds."""
    pages = lambda slot: list(range(50 * slot, 50 * slot + 50))  # noqa: E731
    results = [run(runner, row(0, prompt(1, 0), 0, pages(0)))]
    results.append(run(runner, *(row(slot, prompt(300, slot), 0, pages(slot)) for slot in range(1, 4))))
    results.append(run(runner, *(row(slot, prompt(7 + slot, slot), 0, pages(slot)) for slot in range(8))))
    for step in range(3):
        for count in (1, 2, 3, 8):
            start = [7 + slot + 4 * step + (1, 2, 3, 8).index(count) for slot in range(count)]
            results.append(run(runner, *(row(slot, [slot], start[slot], pages(slot)) for slot in range(count))))
    branch = Branch(runner, Places(runner, PAGE), 0, prompt(200, 1))
    steps = feed(branch, 90, lambda: 30, list)
    for first, count, selector in ((1, 4, "drop"), (2, 3, "conclusion_attention")):
        done, _ = fold(branch, first, count, selector, 0 if selector == "drop" else 12)
        steps |= done | feed(branch, 20, lambda: 1, list)
    return results + [steps[at] for at in sorted(steps)]


def test_one_compile_serves_every_step(folder: Path, loaded: LoadedModel) -> None:
    backend = Counts()
    compiled, plain = build(folder, loaded, backend), build(folder, loaded)
    assert compiled.graphs is not None and compiled.graphs.captures > 20
    for mine, other in zip(drive(compiled), drive(plain), strict=True):
        same(mine, other)
    assert backend.compiles == 1
    assert backend.products == 4 * compiled.num_layers + 1  # of seven in a layer, and the logits


@pytest.mark.usefixtures("loaded")
def test_one_compile_serves_summaries_in_four_bits(folder: Path) -> None:
    backend, options = Counts(), {"fold_storage": "int4"}
    loaded = loader.load(config_of(folder, **options))
    compiled, plain = build(folder, loaded, backend, **options), build(folder, loaded, **options)
    for mine, other in zip(drive(compiled), drive(plain), strict=True):
        same(mine, other)
    assert backend.compiles == 1 and compiled.graphs is not None and compiled.graphs.replays > 40
    compiled.graphs.check_integrity()


def broken(*_: Any) -> Any:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize(
    ("backend", "reason"), [(Counts(spoil=1.0), "compiled logits differ"), (broken, "no compiler here")]
)
def test_what_fails_its_trial_runs_uncompiled(
    folder: Path, loaded: LoadedModel, backend: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = build(folder, loaded, backend)
    assert "qwen3 runs uncompiled" in caplog.text and reason in caplog.text
    same(run(runner, row(0, prompt(5, 0), 0, [1])), run(build(folder, loaded), row(0, prompt(5, 0), 0, [1])))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_no_copy_of_the_kv_is_made(folder: Path, loaded: LoadedModel) -> None:
    """What torch's own backend writes allocates nothing of the size of the KV, and calls attention in each layer."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    with config.patch({"cpp.simdlen": 1, "compile_threads": 1}):  # no vectors, nor a search for what this CPU has
        runner, sources = run_and_get_code(build, folder, loaded, "inductor")
    source = "".join(sources)
    assert source.count("torch.ops.thinkfold.paged_attention.default(") == runner.num_layers
    allocated = [line for line in source.splitlines() if "empty_strided" in line and f"2, {PAGE}, 16)" in line]
    assert not allocated and "aten.clone" not in source
    plain = build(folder, loaded)
    for mine, other in zip(drive(runner), drive(plain), strict=True):
        same(mine, other)
