"""Ranks as threads: collective operations, models split by their plans, and runners that follow captured plans."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from captured_steps import Repeats, prompt, row
from thread_ranks import load_alone
from tiny_qwen3 import tiny_qwen3
from transformers import AutoConfig, AutoModelForCausalLM

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.kv.summary import SummaryGrowth
from thinkfold.runner import collectives, loader
from thinkfold.runner.collectives import Group, GroupError
from thinkfold.runner.compiled import compile_model
from thinkfold.runner.memory import DeviceMemory, fold_budgets
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.plan_wire import PlanReader, PlanWriter
from thinkfold.runner.shard import OwnHeads, Shard
from thinkfold.runner.tensor_parallel import split
from thinkfold.scheduler.output import FoldCommit, MemoryWork, StepPlan
from thinkfold.types import SamplingParams

T = TypeVar("T")
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def together(folder: Path, size: int, body: Callable[[Shard, Group], T], timeout_s: float = 20.0) -> list[T]:
    """What `body` returns on every rank."""

    def run(rank: int) -> T:
        shard = Shard(rank, size, f"{folder}/{rank}")
        group = Group(shard.group, rank, size, folder / "group", CPU, timeout_s)
        return body(shard, group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_adds_gathers_and_tells(tmp_path: Path, size: int) -> None:
    parts = torch.randn(size, 5, 3, generator=torch.Generator().manual_seed(0))

    def body(shard: Shard, group: Group) -> tuple[Any, ...]:
        whole, few = parts[shard.rank].clone(), parts[shard.rank, :2].clone()
        shard.sum_(whole)
        shard.sum_(few)
        told = torch.tensor([shard.rank + 7])
        shard.tell(told)
        return whole, few, group.gather(parts[shard.rank]), int(told), shard.numbers(shard.rank * 2)

    for whole, few, gathered, told, numbers in together(tmp_path, size, body):
        assert torch.equal(whole, sum(parts[1:], parts[0])), "in the order of ranks"
        assert torch.equal(few, whole[:2]), "no bit depends on how many rows there are"
        assert torch.equal(gathered, parts)
        assert (told, numbers) == (7, [2 * rank for rank in range(size)])


def test_a_rank_that_has_gone_is_an_error_of_the_others(tmp_path: Path) -> None:
    def body(shard: Shard, group: Group) -> None:
        if shard.rank:
            group.gather(torch.ones(2))
            group.gather(torch.ones(2))
        else:
            group.gather(torch.ones(2))  # and then no more

    with pytest.raises(GroupError, match="rank 1 of 2 has no answer"):
        together(tmp_path, 2, body, timeout_s=3.0)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "glm4": ("glm4", {}),
}


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in MODELS] + [("qwen3", 3), ("qwen2", 6)])
def test_a_split_model_has_the_logits_of_the_whole(tmp_path: Path, name: str, size: int) -> None:
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | changes)).eval()
    whole.save_pretrained(tmp_path / "model")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval() for _ in range(size)]
    ids = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def body(shard: Shard, group: Group) -> tuple[torch.Tensor, int]:
        model = models[shard.rank]
        split(model, shard)
        return model(ids, use_cache=False).logits, sum(p.numel() for p in model.parameters())

    with torch.no_grad():
        expected = whole(ids, use_cache=False).logits
    parameters = sum(p.numel() for p in whole.parameters())
    for logits, held in together(tmp_path, size, body):
        assert logits.shape == expected.shape
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
        assert held < parameters * (1 / size + 0.25)


@pytest.mark.parametrize(
    ("kind", "size", "changes", "message"),
    [
        ("qwen2", 4, {}, "4 does not divide the 6 attention heads of qwen2"),
        ("qwen3", 3, {"num_key_value_heads": 2}, "3 neither divides the 2 KV heads of qwen3 nor is a multiple"),
        ("llama", 2, {"intermediate_size": 95}, "2 does not divide the 95 of model.layers.0.mlp"),
        ("phi3", 2, {}, "leaves attention whole"),
        ("gpt2", 2, {"n_embd": 48, "n_head": 6}, "no plan to split gpt2"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    tmp_path: Path, kind: str, size: int, changes: dict[str, Any], message: str
) -> None:
    AutoConfig.for_model(kind, **TINY | changes).save_pretrained(tmp_path)
    with pytest.raises(ParameterError, match=message) as caught:
        loader.outline(EngineConfig(model=str(tmp_path), tensor_parallel_size=size))
    assert caught.value.field == "tensor_parallel_size"


def test_a_layer_that_is_no_plain_one_is_refused() -> None:
    model = tiny_qwen3()
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential()
    with pytest.raises(UnsupportedError, match=r"layers.1.mlp.down_proj is a Sequential"):
        split(model, Shard(0, 2))


def test_a_configuration_that_cannot_be_is_refused() -> None:
    with pytest.raises(ParameterError, match="tensor_parallel_size"):
        EngineConfig(tensor_parallel_size=0)
    if not torch.cuda.is_available():
        assert loader.pick_device("auto", Shard(1, 2)) == CPU


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert loader.pick_device("cuda:1", Shard(1, 2)) == torch.device("cuda:2")
    with pytest.raises(ParameterError, match="2 GPUs from 2 on are asked for, torch sees 3") as caught:
        loader.pick_device("cuda:2", Shard(0, 2))
    assert caught.value.field == "tensor_parallel_size"


def test_plans_travel_without_what_is_known() -> None:
    writer, reader = PlanWriter(), PlanReader()
    pages = [4, 2]
    first = row(3, [1, 2, 3], 0, pages, SamplingParams(logit_bias={5: 1.0}), allowed=b"x" * 64)
    read = reader.read(writer.write(StepPlan(7, [first], MemoryWork(copies=[(1, 2)]))))
    (there,) = read.rows
    assert (read.step, read.memory.copies, there.pages, there.token_ids) == (7, [(1, 2)], [4, 2], [1, 2, 3])
    assert [s.slot for s in there.samples] == [3] and there.samples[0].allowed is None
    pages += range(100, 1100)
    long = writer.write(StepPlan(8, [row(3, [], 3, pages)]))
    (grown,) = reader.read(long).rows
    assert grown.pages is there.pages and grown.pages == pages, "a list that is known has grown"
    again = writer.write(StepPlan(9, [row(3, [], 4, pages)]))
    assert len(again) < len(long) / 4
    assert reader.read(again).rows[0].pages == pages
    other = [9, *pages[1:]]
    (moved,) = reader.read(writer.write(StepPlan(10, [row(3, [], 5, other)]))).rows
    assert moved.pages == other and moved.pages is not there.pages, "another list is another one"


def test_each_rank_takes_its_part_of_memory_work() -> None:
    """Two layers of four heads on two ranks; eight blocks a page, the first four of rank 0."""
    counts = list(range(8))
    blocks = [[8 * head + (head % 4 // 2) * 4 + 1] for head in range(8)]
    growth = SummaryGrowth(counts, counts, blocks, [(1, 16, 17), (6, 23, 31)])
    work = MemoryWork(
        swap_out=[(3, 4)],
        blocks_out=[(1, 9), (6, 13)],
        commits=[FoldCommit(0, 2, [5], growth, (blocks, counts))],
        summaries=[(1, [], []), (0, blocks, counts)],
    )
    for rank, heads in ((0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])):
        mine = OwnHeads(Shard(rank, 2), 2, 2, 4).work(work)
        assert mine.swap_out == [(3, 4)], "pages lie on every rank"
        assert mine.blocks_out == [[(1, 5)], [(2, 5)]][rank]
        (commit,) = mine.commits
        assert commit.growth.counts == commit.growth.starts == heads
        assert commit.growth.new_blocks == [[4 * head + 1] for head in heads]
        assert commit.growth.copies == [[(1, 8, 9)], [(2, 11, 15)]][rank]
        assert commit.table == (commit.growth.new_blocks, heads)
        assert mine.summaries == [(1, [], []), (0, commit.growth.new_blocks, heads)]


class Echo(Group):
    """What stands in for other ranks that have what this one has."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        collectives._GROUPS[name] = self

    def sum_(self, x: torch.Tensor) -> None:
        x.mul_(self.size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape).clone()


def test_a_rank_compiles_as_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.cpu_fusion, "fuse", lambda _: 0)
    monkeypatch.setattr(loader.cpu_layers, "speed_up", lambda _: None)
    tiny_qwen3(tie_word_embeddings=True).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", page_size=8, max_num_seqs=2)
    echo = Echo("echo", 2)
    loaded = loader.load(config, Shard(1, 2, "echo"))
    memory = DeviceMemory(config, loaded, fold_budgets(loaded), 64, torch.float32, 2)
    memory.reserve()
    memory.resize(2)
    compiled = compile_model(loaded, memory, 8, "aot_eager")
    assert compiled is not loaded.model, "its logits are those of the uncompiled one"
    assert echo.size == 2
    operations = {type(module).__name__ for module in loaded.model.modules()}
    assert {"SummedLinear", "GatheredLinear"} <= operations


def test_captured_steps_of_two_ranks_draw_what_one_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.cpu_fusion, "fuse", lambda _: 0)
    monkeypatch.setattr(loader.cpu_layers, "speed_up", lambda _: None)
    tiny_qwen3(eos_token_id=2).save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"page_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_bytes=1 << 20, **sizes)
    alone, plans = ModelRunner(config), steps()
    expected = [alone.collect(alone.launch(plan)) for plan in plans]
    writer = PlanWriter()
    wire = [writer.write(plan) for plan in plans]

    def body(shard: Shard, group: Group) -> list[Any]:
        loaded = load_alone(config, shard)
        split_config = replace(config, tensor_parallel_size=2)
        runner = ModelRunner(split_config, loaded=loaded, capture=Repeats(), batch_invariant=False)
        assert runner.graphs is not None
        if shard.rank:
            reader = PlanReader()
            for data in wire:
                runner.follow(reader.read(data))
            return []
        return [runner.collect(runner.launch(plan)) for plan in plans]

    found, _ = together(tmp_path, 2, body)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine.stats, other.stats, strict=True):
            assert (a.logprob, a.entropy) == pytest.approx((b.logprob, b.entropy), abs=1e-4)


def steps() -> list[StepPlan]:
    """A prompt too large for a graph, another, and both go on with what was drawn on the device, one of them random."""
    hot = SamplingParams(temperature=1.5, top_k=30)
    pages = {slot: list(range(8 * slot, 8 * slot + 8)) for slot in (0, 1)}
    plans = [
        [row(0, prompt(21, 0), 0, pages[0], hot)],
        [row(1, prompt(5, 1), 0, pages[1])],
        *([row(0, [], 21 + i, pages[0], hot), row(1, [], 5 + i, pages[1])] for i in range(12)),
        [row(1, [], 17, pages[1], SamplingParams(temperature=0.0, logprobs=2))],
    ]
    return [StepPlan(number, rows) for number, rows in enumerate(plans)]
