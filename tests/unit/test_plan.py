"""`thinkfold plan` against what it plans for: the engine's pool and admission, the simulator, and kept rows."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import make_request
from safetensors import safe_open

import thinkfold.pebble
from thinkfold.cli.main import USAGE_ERROR, main
from thinkfold.config import EngineConfig
from thinkfold.engine import planning
from thinkfold.engine.build import build_core
from thinkfold.engine.planning import Card, Load, Planner, Pool, chat
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Simulation, Window, Work
from thinkfold.types import FOLD_PROFILES, FoldMode, FoldPolicy, FoldProfile, Phase, ThinkingPolicy

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LOAD = Load(100, 700, 50)
BARE: dict[str, Any] = {"gpu_memory_utilization": 1.0, "max_num_seqs": 12, "max_model_len": 2048}


def planner_of(model: str, memory: int = 80 << 30, bandwidth: float = 3.35e12, **settings: Any) -> Planner:
    return Planner(EngineConfig(model=model, **settings), Card(memory, bandwidth, 0))


def small_pool(kv_bytes: int) -> tuple[Planner, Pool]:
    """Pebble in fp32 on a card that has so many bytes left for KV."""
    settings = BARE | {"dtype": "float32"}
    pool = planner_of("pebble", **settings).pool("model")
    planner = planner_of("pebble", pool.weight_bytes + pool.fold_bytes + kv_bytes, **settings)
    return planner, planner.pool("model")


def rows(bench: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{bench}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def planned() -> tuple[Planner, Pool]:
    return small_pool(kv_bytes=20 << 20)


def engine(pool: Pool) -> Any:
    config = EngineConfig(
        kv_cache_bytes=pool.pages * pool.page_bytes, enable_prefix_caching=False, device="cpu", **BARE
    )
    return build_core(config)


def test_the_pool_is_the_engines(planned: tuple[Planner, Pool]) -> None:
    _, pool = planned
    core, model = engine(pool)
    assert (pool.pages, pool.page_bytes, pool.capacity) == (model.num_pages, model.page_bytes, model.kv_capacity)
    assert core.stats().pages_total == pool.pages == (20 << 20) // pool.page_bytes
    kept = Path(thinkfold.pebble.__file__).parent / "model" / "model.safetensors"
    with safe_open(kept, "pt") as file:
        stored = sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    assert pool.weight_bytes == 4 * stored


@pytest.mark.parametrize("policy", [FoldMode.OFF, FoldMode.EAGER])
def test_sessions_are_those_that_the_engine_starts(planned: tuple[Planner, Pool], policy: FoldMode) -> None:
    """All at once: the engine starts as many of one age as the plan calls safe."""
    planner, pool = planned
    core, _ = engine(pool)
    for i in range(12):
        thinking = ThinkingPolicy(True, LOAD.thinking, "default", answer_reserve=LOAD.answer)
        request = make_request(
            str(i), [40 + i] * LOAD.prompt, thinking=thinking, phase=Phase.THINKING, max_tokens=LOAD.output
        )
        object.__setattr__(request, "fold", FoldPolicy(policy, profile="pebble", entries=32))
        core.add(request)
    for _ in range(3):
        core.step()
    wanted = planner.outlook(pool, LOAD, policy).sessions
    assert core.stats().running == wanted
    assert 1 < wanted < 12


def simulate(load: Load, policy: FoldMode, numbers: FoldProfile, pages: int, page: int) -> Any:
    kv = KVManager(pages, page, enable_prefix_caching=False, num_heads=2, reserve_pages=1)
    scheduler = Scheduler(
        kv,
        max_num_seqs=40,
        max_num_batched_tokens=512,
        fold_counts=lambda entries, tokens: [min(entries, tokens)] * 2,
        admission=Admission(kv.capacity * page, page),
    )
    ends = tuple(range(20, load.thinking + 1, 20))
    work = (Work(load.prompt, load.thinking, load.answer, ends) for _ in count())
    fold = FoldPolicy(policy, entries=numbers.entries)
    options: dict[str, Any] = {"budget": load.thinking, "max_tokens": load.output, "clients": 40}
    return Simulation(scheduler, work, fold=fold, numbers=numbers, window=Window(60, 60), **options).run()


@pytest.mark.parametrize("policy", list(FoldMode))
def test_the_simulator_runs_between_safe_and_spread_sessions(policy: FoldMode) -> None:
    """The real scheduler under requests that are all alike, always with more of them waiting."""
    numbers, load, page = FoldProfile(32, 8, 4, 8, 4), Load(8, 300, 8), 4
    planner = planner_of("pebble", **(BARE | {"max_num_seqs": 40}))
    planner._numbers = numbers
    plan = planner.outlook(Pool(0, 0, page, page, 300, 1), load, policy)
    outcome = simulate(load, policy, numbers, 300, page)
    assert plan.sessions <= outcome.safe_sessions
    assert plan.sessions <= outcome.running_mean <= 1.1 * plan.spread
    if policy is not FoldMode.PRESSURE:
        held = outcome.kv_pool_use_mean * 300 * page / outcome.running_mean
        assert held == pytest.approx(plan.mean, rel=0.1)


def test_a_kept_row_of_the_simulator() -> None:
    """10,000 requests that fold eagerly hold as many entries each as the plan says, and never more at a time."""
    row = next(r["metrics"] for r in rows("simulate") if r["case"] == "overload-32k/eager")
    load, numbers, pages = Load(31, 500, 8), FoldProfile(16, 4, 4, 4, 1), 3 * 539
    course = planning._Course(load, numbers)
    assert row["kv_pool_use_mean"] * pages / row["running_mean"] == pytest.approx(course.mean, rel=0.15)
    planner = planner_of("pebble", **BARE)
    planner._numbers = numbers
    assert planner.outlook(Pool(0, 0, 1, 1, pages, 1), load, FoldMode.EAGER).sessions >= row["safe_sessions"]
    assert planner.outlook(Pool(0, 0, 1, 1, pages, 0), load, FoldMode.OFF).sessions == 3


def test_kept_rows_of_decode_steps_have_the_floor_of_the_plan() -> None:
    planner, checked = planner_of("7b"), 0
    for row in rows("decode"):
        shape = row["case"].removeprefix("7b/").partition("/")[0].split("x")
        if not row["case"].startswith("7b/") or "fp8" in row["case"] or "floor_ms" not in row["metrics"]:
            continue
        batch, entries = int(shape[0]), int(shape[1].removesuffix("k")) * 1024
        entry = 28 * 4 * 2 * 128 * 2  # without the plane of β, which is read with summaries only
        read = planner._weights.read(batch) + batch * entries * entry
        metrics = row["metrics"]
        assert 1e3 * read / (metrics["copy_tb_per_s"] * 1e12) == pytest.approx(metrics["floor_ms"], rel=1e-4)
        checked += 1
    assert checked >= 3


def test_published_sizes() -> None:
    """Qwen3-32B has 32.8 billion parameters, R1-Distill-Qwen-7B 7.6."""
    for shape, billions in (("32b", 32.8), ("7b", 7.6)):
        pool = planner_of(shape).pool("model")
        assert pool.weight_bytes / 2e9 == pytest.approx(billions, abs=0.05)
    layers, heads, dim = 28, 4, 128
    assert planner_of("7b").pool("fp8_e4m3").entry_bytes == layers * heads * (2 * dim + 2 * 2 + 4)


def test_folds_raise_sessions_and_pressure_reads_a_full_pool() -> None:
    planner = planner_of("32b", max_num_seqs=16, gpu_memory_utilization=0.92)
    pool, load = planner.pool("fp8_e4m3"), Load(2000, 32_768, 500)
    off, pressure, eager = (planner.outlook(pool, load, policy) for policy in FoldMode)
    assert off.spread < eager.spread == pressure.spread
    assert off.read / off.spread == pytest.approx(2000 + 33_268 / 2, rel=0.01)
    assert eager.read < pressure.read <= pool.capacity
    assert eager.tokens_per_s == pytest.approx(eager.spread / eager.step_s)
    assert planner.outlook(pool, chat(), FoldMode.EAGER).peak == 1300


def test_of_experts_a_step_reads_those_that_are_asked() -> None:
    config = SimpleNamespace(tie_word_embeddings=False, num_experts=8, num_experts_per_tok=2)
    table = torch.nn.Parameter(torch.zeros(10))
    named = {"embed": table, "mlp.experts.up": torch.nn.Parameter(torch.zeros(80)), "norm": table[:5]}
    model = SimpleNamespace(
        config=config,
        named_parameters=lambda: named.items(),
        get_input_embeddings=lambda: SimpleNamespace(weight=table),
    )
    weights = planning._Weights(SimpleNamespace(model=model))
    assert weights.total == 4 * 95
    assert weights.read(1) == pytest.approx(4 * (5 + 80 / 4))
    assert weights.read(3) == pytest.approx(4 * (5 + 80 * (1 - 0.75**3)))


def test_it_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "7b", "--thinking", "8k", "--compare", "chat", "--max-num-seqs", "8"]) == 0
    text = capsys.readouterr().out
    assert (
        "where it says 8, max_num_seqs is the bound" in text
        and "beside a chat reply (1,000 + 300 tokens): 8 at a time" in text
    )
    assert main(["plan", "--model", "7b", "--thinking", "8k", "--compare", "chat", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load"]["thinking"] == 8192
    assert set(found["kv"]) == {"model", "fp8_e4m3"}
    assert set(found["kv"]["model"]["policies"]) == {"off", "pressure", "eager"}
    lengths = [point["thinking"] for point in found["curve"]]
    assert lengths == [1024 << i for i in range(7)], "the model takes no 128k beside a prompt"
    raw = [point["off"]["byte_seconds"] for point in found["curve"]]
    assert raw == sorted(raw) and found["chat"]["ratios"]["off"]["byte_seconds"] > 100


def test_a_folder_with_nothing_but_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}
    shape |= {"max_position_embeddings": 4096, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = ["--gpu-memory", "1", "--overhead", "0", "--thinking", "1k", "--json"]
    assert main(["plan", "--model", str(tmp_path), *options]) == 0
    kv = json.loads(capsys.readouterr().out)["kv"]["model"]
    assert kv["entry_bytes"] == 2 * 2 * (2 * 16 * 2 + 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--thinking", "much"], "thinking: must be a number of tokens"),
        (["--model", "32b", "--thinking", "64k"], "thinking: prompt, thinking and answer are 68,036 tokens"),
        (["--prompt", "0"], "prompt: must be at least 1, got 0"),
        (["--answer", "-3"], "answer: must be a number of tokens"),
        (["--gpu-memory", "0"], "gpu_memory: must be in (0"),
        (["--bandwidth", "-1"], "bandwidth: must be in (0"),
        (["--overhead", "-1"], "overhead: must be in [0"),
        (["--model", "32b", "--gpu-memory", "40"], "gpu_memory: of 38.7 GB, weights take 65.5"),
        (["--page-size", "7"], "page_size: must be one of"),
        (["--model", "/nowhere"], "model: cannot load '/nowhere'"),
    ],
)
def test_errors_name_the_flag(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == USAGE_ERROR
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_profiles_of_the_plan_are_the_engines() -> None:
    planner = planner_of("7b", fold_profile="fine", fold_entries=16)
    assert planner._numbers.entries == 16
    assert planner._numbers.max_segment_tokens == FOLD_PROFILES["fine"].max_segment_tokens
