"""ModelRunner step by step: tokens kept on the device, page copies, broken rows, equal bits."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.runner import loader, sizing
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.output import BatchRow, MemoryWork, SampleRow, StepPlan, StepResult
from thinkfold.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PAGE = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(
        "qwen3",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=[2, 1],
    )
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(folder)
    return EngineConfig(
        model=str(folder),
        device="cpu",
        page_size=PAGE,
        kv_cache_bytes=1 << 22,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return loader.load(config)


@pytest.fixture
def runner(config: EngineConfig, loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(config, loaded=loaded, end_marker_id=5)


def row(
    slot: int, ids: list[int], start: int, pages: list[int], params: SamplingParams = GREEDY, *, late: bool = False
) -> BatchRow:
    n = 1 if late else len(ids)
    return BatchRow(slot, ids, late, start, start, pages, [SampleRow(slot, params, 5, 0, start + n)])


def run(runner: ModelRunner, *rows: BatchRow, copies: list[tuple[int, int]] | None = None) -> StepResult:
    return runner.collect(runner.launch(StepPlan(1, list(rows), MemoryWork(copies=copies or []))))


def prompt(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(n)]


def test_what_the_core_reads(runner: ModelRunner) -> None:
    assert (runner.vocab_size, runner.max_model_len, runner.model_type) == (97, 1024, "qwen3")
    assert runner.eos_token_ids == (1, 2) and runner.tokenizer is None
    assert runner.page_bytes == 2 * 2 * 2 * PAGE * 16 * 4
    assert runner.num_pages == (1 << 22) // runner.page_bytes


def test_tokens_stay_on_the_device_between_steps(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0)
    ids, pages = prompt(20), list(range(4))
    told: list[int] = []
    for i in range(6):
        start = 0 if i == 0 else 20 + i - 1
        told += run(runner, row(0, told[-1:] or ids, start, pages, params)).token_ids
    pending = [runner.launch(StepPlan(0, [row(3, ids, 0, pages, params)]))]
    for i in range(5):  # every step is launched before any result is read
        neighbour = row(1, prompt(3, i), 0, [9])
        pending.append(runner.launch(StepPlan(i, [neighbour, row(3, [], 20 + i, pages, params, late=True)])))
    assert [runner.collect(p).token_ids[-1] for p in pending] == told


def test_a_copied_page_goes_its_own_way(runner: ModelRunner) -> None:
    ids = prompt(12)
    first = run(runner, row(0, ids, 0, [4, 5])).token_ids
    fork = run(runner, row(1, [60], 12, [4, 6]), row(0, [61], 12, [4, 5]), copies=[(5, 6)])
    alone = run(runner, row(2, [*ids, 60], 0, [7, 8]), row(3, [*ids, 61], 0, [10, 11]))
    assert first and fork.token_ids == alone.token_ids
    assert [s.logprob for s in fork.stats] == [s.logprob for s in alone.stats]


def test_rows_without_samples_draw_nothing(runner: ModelRunner) -> None:
    quiet = BatchRow(0, prompt(5), False, 0, 0, [1], [])
    assert run(runner, quiet).token_ids == []
    assert len(run(runner, quiet, row(1, prompt(3), 0, [2])).token_ids) == 1


def test_one_row_may_draw_for_several_branches(runner: ModelRunner) -> None:
    """n > 1 prefills once: the last logits give the first token of every branch."""
    params = SamplingParams(temperature=1.5)
    one = BatchRow(0, prompt(9), False, 0, 0, [1, 2], [SampleRow(b, params, 5, b, 9) for b in range(6)])
    result = run(runner, one)
    assert len(result.token_ids) == 6 and len(set(result.token_ids)) > 1
    late = [BatchRow(b, [], True, 9, 9, [1, 10 + b], [SampleRow(b, GREEDY, 0, 0, 10)]) for b in range(6)]
    told = [BatchRow(b, [result.token_ids[b]], False, 9, 9, [1, 10 + b], late[b].samples) for b in range(6)]
    copies = [(2, 10 + b) for b in range(6)]
    assert run(runner, *late, copies=copies).token_ids == run(runner, *told, copies=copies).token_ids


def test_logical_positions_may_run_ahead_of_stored_entries(runner: ModelRunner) -> None:
    ids = prompt(10)
    shifted = BatchRow(0, ids, False, 300, 0, [1, 2], [SampleRow(0, GREEDY, 0, 0, 310)])
    base, moved = run(runner, row(1, ids, 0, [3, 4])), run(runner, shifted)
    # rope is relative: the same text elsewhere has the same logits up to rounding
    assert moved.stats[0].logprob == pytest.approx(base.stats[0].logprob, abs=1e-4)


def test_too_few_pages_are_refused(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        run(runner, row(0, prompt(9), 0, [1]))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, logprobs=2)])
def test_a_poisoned_row_fails_alone_and_its_pages_can_be_reused(runner: ModelRunner, params: SamplingParams) -> None:
    """Design rule 11: NaN in one row's KV marks that row with -1, not the batch."""
    run(runner, row(0, prompt(12), 0, [1, 2], params), row(1, prompt(12, 1), 0, [3, 4], params))
    good = run(runner, row(1, [7], 12, [3, 4], params))
    runner._memory.storage.tensor[1] = torch.nan
    both = run(runner, row(0, [7], 12, [1, 2], params), row(1, [7], 12, [3, 4], params))
    assert both.token_ids == [-1, *good.token_ids]
    clean = run(runner, row(2, prompt(10, 2), 0, [20, 21], params))
    runner._memory.storage.tensor[[1, 2]] = torch.nan
    reused = run(runner, row(2, prompt(10, 2), 0, [1, 2], params))
    assert reused.token_ids == clean.token_ids and reused.stats[0].logprob == clean.stats[0].logprob


@pytest.mark.parametrize(("threads", "length"), [(1, 430), (2, 70)])
def test_bits_are_equal_alone_in_a_batch_and_in_any_chunks(runner: ModelRunner, threads: int, length: int) -> None:
    """Design rule 10, at the log-probs of every token of a text."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids, pages, rng = prompt(length), list(range(60)), random.Random(3)
        alone = {}
        for i in range(length):
            alone[i + 1] = run(runner, row(0, ids[i : i + 1], i, pages)).stats[0]
        for _ in range(3):
            done = 0
            while done < length:
                n = min(rng.choice([1, 2, 5, 16, 100, 300]), length - done)
                others = [
                    row(s, prompt(rng.choice([1, 1, 4, 30]), s), rng.choice([0, 40]), list(range(s * 20, s * 20 + 20)))
                    for s in range(4, 4 + rng.randrange(4))
                ]
                result = run(runner, *others, row(0, ids[done : done + n], done, pages))
                done += n
                assert result.stats[-1] == alone[done]
    finally:
        torch.set_num_threads(before)


def test_no_end_token_of_the_tokenizer_is_drawn_where_none_may_be(config: EngineConfig, loaded: LoadedModel) -> None:
    """A checkpoint's configuration often lacks the end token that its chat template uses."""
    runner = ModelRunner(config, loaded=loaded, eos_token_ids={5, 10**6})
    ends = SamplingParams(temperature=0.0, logit_bias={5: 100.0})
    drawn = []
    for ban_eos in (False, True):
        sample = SampleRow(0, ends, 0, 0, 3, ban_eos=ban_eos)
        drawn.append(run(runner, BatchRow(0, [7, 8, 9], False, 0, 0, [0], [sample])).token_ids[0])
    assert drawn[0] == 5
    assert drawn[1] != 5


def test_the_host_pool_is_capped(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    free = EngineConfig(model="x", kv_cache_bytes=None, max_num_seqs=4, page_size=16, gpu_memory_utilization=0.5)
    cpu = torch.device("cpu")
    monkeypatch.setattr(sizing, "_free_host_bytes", lambda: 1 << 40)
    assert sizing.pool_pages(free, 1000, 1 << 10, cpu, lambda: None) == 4 * 63
    assert sizing.pool_pages(free, 1 << 20, 1 << 20, cpu, lambda: None) == sizing.HOST_CAP >> 20
    monkeypatch.setattr(sizing, "_free_host_bytes", lambda: 64 << 20)
    assert sizing.pool_pages(free, 1 << 20, 1 << 20, cpu, lambda: None) == 16
    with pytest.raises(ParameterError, match="kv_cache_bytes"):
        sizing.pool_pages(config, 1000, 1 << 22, cpu, lambda: None)
