"""`thinkfold bench headline`: requests of any age on the real core, with a model and without one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_qwen3 import tiny_qwen3

from thinkfold.cli import bench
from thinkfold.cli.staged import FilledRunner
from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.runner import loader
from thinkfold.scheduler.output import BatchRow
from thinkfold.types import FOLD_PROFILES, FoldMode

headline = bench.load(Path(__file__).parents[2] / "benchmarks" / "headline.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_qwen3(max_position_embeddings=1 << 18).save_pretrained(folder)
    return str(folder)


def measured(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    assert headline.main([*options, "--json", "--no-record"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["case"]: row["metrics"] for row in found}


def test_requests_end_where_their_profile_folds_and_are_what_the_case_says() -> None:
    request = headline.CASES["7b-8k"].request(3, 1000, FoldMode.EAGER)
    forced = request.sampling.forced_tokens
    assert (len(request.prompt_token_ids), len(forced), forced.count(headline.CLOSE)) == (512, 8192, 0)
    first, *others = [i + 1 for i, token in enumerate(forced) if token == headline.BREAK]
    assert 128 <= first <= 512 and others == list(range(first + 512, 8192, 512))
    assert len({headline.CASES["7b-8k"].request(i, 1000, FoldMode.OFF).sampling.forced_tokens for i in range(9)}) > 7
    long = headline.CASES["7b-32k"].request(0, 1000, FoldMode.OFF).sampling.forced_tokens
    assert len(long) == 32500 and long.index(headline.CLOSE) == 31999
    ends = [0, *(i + 1 for i, token in enumerate(long) if token == headline.BREAK)]
    lengths = [b - a for a, b in pairwise(ends)]
    assert min(lengths) >= 512 and max(lengths) <= 2048
    assert 850 <= sum(lengths) / len(lengths) <= 1200


def test_an_arm_is_a_policy_with_marks() -> None:
    assert headline.Arm.parse("off_greedy/fp8") == (FoldMode.OFF, True, True, False)
    assert headline.Arm.parse("eager/ample") == (FoldMode.EAGER, False, False, True)
    for wrong in ("eager/int4", "on", "", "eager_greedy"):
        with pytest.raises(ParameterError, match="arm"):
            headline.Arm.parse(wrong)


def test_a_whole_batch_is_run_and_counted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", model, "--device", "cpu", "--case", "7b-8k", "--scale", "32", "--sessions", "3")
    found = measured(capsys, *options, "--arm", "off_greedy")
    numbers = found["7b-8k/off_greedy/3_sessions/scale32"]
    assert (numbers["completed"], numbers["output_tokens"]) == (3, 3 * 256)
    assert numbers["entries_peak"] >= 512 // 32 + 255
    assert numbers["output_tokens_per_s"] == pytest.approx(3 * 256 / numbers["wall_s"], rel=1e-4)


def test_aged_requests_have_folded_before_the_clock_starts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", model, "--device", "cpu", "--case", "long-128k", "--scale", "32", "--steps", "4")
    found = measured(capsys, *options, "--arm", "eager", "--arm", "off")
    off = [numbers for case, numbers in found.items() if "/off/" in case]
    eager = [numbers for case, numbers in found.items() if "/eager/" in case]
    assert len(off) == len(eager) == len(headline.POINTS)
    for point, raw, folded in zip(headline.POINTS, off, eager, strict=True):
        assert raw["entries_peak"] == pytest.approx(2000 // 32 + point // 32, abs=8)
        assert raw["steps"] <= 5 and raw["folds"] == 0
        assert folded["entries_peak"] <= raw["entries_peak"]
    numbers, thought = FOLD_PROFILES["default"], headline.POINTS.index(128000)
    assert eager[thought]["entries_peak"] < 2000 // 32 + 2048 + numbers.fold_delay + 4 * numbers.entries
    assert off[thought]["entries_peak"] > 4000


def test_arms_that_need_the_same_runner_share_it_and_find_nothing_there(model: str) -> None:
    base = EngineConfig(model=model, device="cpu", kv_cache_bytes=1 << 20, max_num_seqs=2)
    loaded, kept = loader.load(base), {}
    runner = headline.runner_for(replace(base, fold_profile="fine"), loaded, kept)
    assert headline.runner_for(replace(base, admission="greedy"), loaded, kept) is runner
    memory = runner._memory
    memory.tables.set(1, [[3]] * 4, [5] * 4)
    memory.queries.place([BatchRow(1, [0] * 9, False, 0, 0, [0], keep_queries=True)])
    assert memory.tables.rows([1]) == [1] and memory.queries.positions(1, None)
    FilledRunner(runner, 2)
    assert memory.tables.rows([1]) == [-1] and not memory.queries.positions(1, None)
    assert headline.runner_for(replace(base, page_size=8), loaded, kept) is not runner and len(kept) == 1


def test_filling_computes_nothing_and_then_every_step_is_whole(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    own = headline.run_stages.__globals__["ModelRunner"].launch
    monkeypatch.setattr(
        headline.run_stages.__globals__["ModelRunner"],
        "launch",
        lambda self, plan: (launched.append(plan.num_tokens), own(self, plan))[1],
    )
    options = ("--model", model, "--device", "cpu", "--case", "7b-32k", "--scale", "64", "--seconds", "0.2")
    numbers = measured(capsys, *options, "--arm", "eager", "--sessions", "5")["7b-32k/eager/5_sessions/scale64"]
    assert 4 <= numbers["running_mean"] <= 5 and numbers["forced_preemptions"] == 0
    assert numbers["steps"] <= len(launched) and max(launched) <= 5 * (2000 // 64)  # no past


def test_predictions_need_no_device_and_count_the_same_steps(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", model, "--case", "7b-8k", "--scale", "8", "--sessions", "2", "--arm", "eager")
    (numbers,) = measured(capsys, *options, "--device", "cpu").values()
    (told,) = measured(capsys, *options, "--predict").values()
    assert told["steps"] == pytest.approx(numbers["steps"], abs=4)
    assert told["folds"] == numbers["folds"] == 3
    assert told["entries_peak"] == numbers["entries_peak"] < 512 // 8 + 8192 // 8


def test_less_than_nothing_is_refused() -> None:
    for wrong in ("--scale", "--steps", "--sessions", "--seconds"):
        with pytest.raises(SystemExit):
            headline.main([wrong, "-1", "--predict"])
