"""`thinkfold bench memory`: its cases, what a pool of fp8 holds, and means that no clock bends."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinkfold.cli import bench, watched
from thinkfold.config import EngineConfig

memory = bench.load(Path(__file__).parents[2] / "benchmarks" / "memory.py")


def test_a_pool_of_fp8_holds_nearly_twice_the_tokens_of_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """64 codes and an fp16 scale against 64 numbers of 16 bits, K and V, and the same β for both."""
    assert memory.main(["--case", "pool/fp8", "--threads", "1", "--json", "--no-record"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["pool_tokens_bf16"] > 3 * 5000
    assert metrics["pool_ratio"] == pytest.approx(metrics["pool_tokens"] / metrics["pool_tokens_bf16"], rel=1e-4)
    assert metrics["pool_ratio"] >= 1.9


def test_pages_of_every_size_share_the_same_bytes() -> None:
    args = Namespace(mean_tokens=1000, longest_tokens=2000, page_size=16, slots=4, clients=6, device="cpu")
    cases: dict[str, EngineConfig] = memory.cases(args, 1 << 15)
    assert {case: config.page_size for case, config in cases.items() if case.startswith("page/")} == {
        f"page/{size}": size for size in (8, 16, 32, 64)
    }
    assert len({config.kv_cache_bytes for case, config in cases.items() if case.startswith("page/")}) == 1
    assert cases["at_answer/recycle"].fold_policy == cases["at_answer/keep"].fold_policy == "off"


@pytest.mark.parametrize("by_steps", [True, False])
def test_means_over_steps_weigh_each_step_the_same(by_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    clock = iter([0.0, 5.0, 6.0])
    monkeypatch.setattr(watched, "Watch", lambda scheduler: SimpleNamespace(tick=ticks.append))
    monkeypatch.setattr(watched, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    core: Any = SimpleNamespace(_scheduler=None, advance=lambda: None, stats=lambda: SimpleNamespace(steps=0))
    looking = watched.WatchedCore(core, lambda _: True, lambda _: False, by_steps=by_steps)
    looking.advance()
    looking.advance()
    assert ticks == ([1.0, 1.0] if by_steps else [5.0, 1.0])
