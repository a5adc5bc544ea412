"""Captured steps with a stand-in that runs what it was told to capture: equal to eager, and nothing made anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_steps import GREEDY, VOCAB, Repeats, prompt, row
from fold_branch import Branch, Places, feed, fold
from tiny_qwen3 import tiny_qwen3

from tests.near import assert_same_top
from thinkfold.config import EngineConfig
from thinkfold.errors import UnsupportedError
from thinkfold.runner import loader
from thinkfold.runner.graph_inputs import Bucket, Buckets, num_words, views
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.runner.page_tables import PageTables
from thinkfold.runner.sampler import Draws
from thinkfold.scheduler.output import BatchRow, MemoryWork, SampleRow, StepPlan, StepResult
from thinkfold.types import SamplingParams

PAGE, SEQS = 8, 8
FILTERED = SamplingParams(temperature=0.9, top_p=0.8, top_k=20, min_p=0.01)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_qwen3(eos_token_id=[2, 1]).save_pretrained(folder)
    return EngineConfig(
        model=str(folder),
        device="cpu",
        page_size=PAGE,
        kv_cache_bytes=1 << 21,
        max_num_seqs=SEQS,
        max_num_batched_tokens=64,
        swap_space_bytes=1 << 19,
    )


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return loader.load(config)


@pytest.fixture
def pair(config: EngineConfig, loaded: LoadedModel) -> tuple[ModelRunner, ModelRunner]:
    """Two runners of one model: captured and eager."""
    options: dict[str, Any] = {"loaded": loaded, "end_marker_id": 5, "batch_invariant": False}
    return ModelRunner(config, **options, capture=Repeats()), ModelRunner(config, **options)


def run(runner: ModelRunner, *rows: BatchRow, memory: MemoryWork | None = None) -> StepResult:
    result = runner.collect(runner.launch(StepPlan(0, list(rows), memory or MemoryWork())))
    runner._memory.check_integrity()
    if runner.graphs is not None:
        runner.graphs.check_integrity()
    return result


def same(mine: StepResult, other: StepResult) -> None:
    assert mine.token_ids == other.token_ids
    for a, b in zip(mine.stats, other.stats, strict=True):
        assert (a.logprob, a.entropy, a.confidence, a.margin) == pytest.approx(
            (b.logprob, b.entropy, b.confidence, b.margin), abs=1e-4, nan_ok=True
        )
    for one, two in zip(mine.logprobs, other.logprobs, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert_same_top(one.top, two.top, 1e-4)


KINDS = {
    "greedy": [GREEDY] * 3,
    "free": [SamplingParams(temperature=1.2), GREEDY, SamplingParams(temperature=0.7)],
    "filtered": [FILTERED, SamplingParams(temperature=1.0, top_p=0.5), GREEDY],
    "top logprobs": [SamplingParams(temperature=0.0, logprobs=3), GREEDY, FILTERED],
    "penalties": [SamplingParams(temperature=0.5, frequency_penalty=1.5), GREEDY, FILTERED],
    "bias": [SamplingParams(temperature=0.0, logit_bias={3: 50.0}), GREEDY, GREEDY],
}


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_equal_eager_ones(pair: tuple[ModelRunner, ModelRunner], kind: str) -> None:
    """Prefill in chunks, decode from what was drawn a step before, and both in one step."""
    captured, eager = pair
    assert captured.graphs is not None
    made, params = captured.graphs.captures, KINDS[kind]
    histories = [([], []) if p.frequency_penalty else None for p in params]
    lengths = [5, 20, 9]
    texts = [prompt(n, i) for i, n in enumerate(lengths)]
    pages = [[10 * i + j for j in range(8)] for i in range(3)]
    for runner_rows in ([(0, 5), (1, 13)], [(0, 0), (1, 7), (2, 9)]):
        rows = []
        for slot, n in runner_rows:
            start = 0 if n != 7 else 13
            ids = texts[slot][start : start + n]
            rows.append(row(slot, ids, start if n else 5, pages[slot], params[slot], history=histories[slot]))
            histories[slot] = None
        same(run(captured, *rows), run(eager, *rows))
    for step in range(12):
        rows = [row(i, [], n + step + (i == 0), pages[i], params[i]) for i, n in enumerate(lengths)]
        same(run(captured, *rows), run(eager, *rows))
    assert captured.graphs.captures == made
    assert captured.graphs.replays == 14


def test_forced_and_banned_tokens(pair: tuple[ModelRunner, ModelRunner]) -> None:
    wants_end = SamplingParams(temperature=0.0, logit_bias={2: 90.0})
    stops = SamplingParams(temperature=0.0, stop_token_ids=(11,))
    only_9 = (1 << 9).to_bytes(16, "little")
    for params in (GREEDY, FILTERED, wants_end, stops):
        rows = [
            row(0, prompt(4, 0), 0, [0], params, forced_token=42),
            row(1, prompt(6, 1), 0, [1], params, ban_eos=True),
        ]
        results = [run(runner, *rows) for runner in pair]
        same(*results)
        masked = [rows[0], row(1, prompt(6, 1), 0, [1], params, allowed=only_9)]
        assert [run(runner, *masked).token_ids for runner in pair] == [[42, 9], [42, 9]]
        assert results[0].token_ids[0] == 42 and results[0].token_ids[1] not in (1, 2)


def test_one_row_may_draw_for_several_branches(pair: tuple[ModelRunner, ModelRunner]) -> None:
    params = SamplingParams(temperature=1.5)
    samples = [SampleRow(b, params, 5, b, 4) for b in range(6)]
    one = BatchRow(0, prompt(4, 0), False, 0, 0, [1], samples)
    results = [run(runner, one) for runner in pair]
    same(*results)
    quiet = BatchRow(7, prompt(3, 2), False, 0, 0, [2], [])
    assert [run(runner, quiet).token_ids for runner in pair] == [[], []]
    later = [row(b, [], 4, [1, 10 + b], params) for b in range(6)]
    copies = MemoryWork(copies=[(1, 10 + b) for b in range(6)])
    same(*(run(runner, *later, memory=copies) for runner in pair))


def test_padding_writes_nowhere(pair: tuple[ModelRunner, ModelRunner]) -> None:
    captured, _ = pair
    memory = captured._memory
    memory.storage.tensor.fill_(7.0)
    captured._last_token.fill_(-5)
    run(captured, row(3, prompt(5, 0), 0, [4]), row(6, [9], 0, [9]), row(1, [8], 0, [11]))
    changed = (memory.storage.tensor != 7.0).any(dim=(1, 2, 3, 5))  # [pages, page_size]
    assert changed.nonzero().tolist() == [[4, i] for i in range(5)] + [[9, 0], [11, 0]]
    assert (captured._last_token[:SEQS] >= 0).nonzero()[:, 0].tolist() == [1, 3, 6]


def test_a_step_that_is_too_large_runs_eagerly(config: EngineConfig, loaded: LoadedModel) -> None:
    from dataclasses import replace

    large = replace(config, max_num_batched_tokens=1024)
    captured = ModelRunner(large, loaded=loaded, batch_invariant=False, capture=Repeats())
    eager = ModelRunner(large, loaded=loaded, batch_invariant=False)
    assert captured.graphs is not None
    rows = [row(i, prompt(300, i), 0, list(range(40 * i, 40 * i + 40))) for i in range(2)]
    same(run(captured, *rows), run(eager, *rows))
    assert captured.graphs.replays == 0
    later = [row(i, [], 300, list(range(40 * i, 40 * i + 40))) for i in range(2)]
    same(run(captured, *later), run(eager, *later))
    assert captured.graphs.replays == 1


@pytest.mark.parametrize("selector", ["drop", "conclusion_attention", "kmeans"])
def test_folds_swaps_and_forks_capture_nothing(pair: tuple[ModelRunner, ModelRunner], selector: str) -> None:
    """The same branch on both runners: folded twice, swapped out and in to another slot, forked, ended."""
    graphs = pair[0].graphs
    assert graphs is not None
    made, told = graphs.captures, []
    for runner in pair:
        one = Branch(runner, Places(runner, PAGE), 0, prompt(300, 1))
        neighbour = lambda runner=runner: [row(4, [5], 0, [runner.num_pages - 1])]  # noqa: E731
        results = feed(one, 90, lambda: 30, neighbour)
        for first, pages in ((1, 4), (2, 3)):
            done, _ = fold(one, first, pages, selector, 0 if selector == "drop" else 12)
            results |= done | feed(one, 20, lambda: 1, neighbour)
        work = MemoryWork(forks=[(0, 3)], summaries=[(3, one.summary.blocks, one.summary.lengths)])
        one.pages, one.slot = list(one.pages), 3
        results |= feed(one, 12, lambda: 1, neighbour, memory=work)
        host = list(range(len(one.pages)))
        out = MemoryWork(queries_out=[(3, 77)], swap_out=list(zip(one.pages, host, strict=True)))
        runner.launch(StepPlan(0, [], out))
        moved = [one.places.page() for _ in one.pages]
        back = MemoryWork(swap_in=list(zip(host, moved, strict=True)), queries_in=[(77, 6)])
        back.summaries = [(6, one.summary.blocks, one.summary.lengths), (3, [], [])]
        one.pages, one.slot = moved, 6
        results |= feed(one, 20, lambda: 1, neighbour, memory=back)
        told.append(results)
    assert graphs.captures == made and graphs.replays > 60
    graphs.check_integrity()
    for computed, result in told[0].items():
        same(result, told[1][computed])
    kept = [runner._memory.queries for runner in pair]
    assert kept[0].positions(6, None) == kept[1].positions(6, None) != []
    for mine, other in zip(*(k.read(6, k.positions(6, None)) for k in kept), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_replaced_tensor_is_found_out(pair: tuple[ModelRunner, ModelRunner]) -> None:
    captured, _ = pair
    assert captured.graphs is not None
    captured._memory.tables.table = captured._memory.tables.table.clone()
    with pytest.raises(AssertionError, match="replaced"):
        captured.graphs.check_integrity()


def test_broken_logits_fail_their_row(pair: tuple[ModelRunner, ModelRunner]) -> None:
    captured, _ = pair
    run(captured, row(0, prompt(12, 0), 0, [1, 2]), row(1, prompt(12, 1), 0, [3, 4]))
    captured._memory.storage.tensor[1] = torch.nan
    result = run(captured, row(0, [7], 12, [1, 2]), row(1, [7], 12, [3, 4]))
    assert result.token_ids[0] == -1 and result.token_ids[1] >= 0


def test_too_few_pages_are_refused(pair: tuple[ModelRunner, ModelRunner]) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        run(pair[0], row(0, prompt(9, 0), 0, [1]))


def test_the_pool_counts_what_graphs_take(config: EngineConfig, loaded: LoadedModel, monkeypatch: Any) -> None:
    from dataclasses import replace

    from thinkfold.runner import sizing

    class Growing(Repeats):
        made = 0

        def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
            self.made += 1
            return super().__call__(body)

        def used_bytes(self) -> int:
            return self.made * 1000

    told = []
    monkeypatch.setattr(sizing, "pool_pages", lambda *args: told.append(args[-1]) or 50)
    capture = Growing()
    sized = ModelRunner(replace(config, kv_cache_bytes=None), loaded=loaded, capture=capture)
    assert sized.graphs is not None and capture.resets == 1
    assert told == [1000 * (capture.made - 4)]  # four were made to find out, and thrown away
    assert capture.made - 4 == len([1 for jobs in sized.graphs._sorts() for _ in jobs])


def test_a_model_that_cannot_be_captured_is_refused_by_name(config: EngineConfig, loaded: LoadedModel) -> None:
    class Fails(Repeats):
        def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(UnsupportedError, match="enforce_eager: qwen3 cannot be captured"):
        ModelRunner(config, loaded=loaded, capture=Fails())


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (3, 2), (8, 64), (32, 2048), (200, 8192), (700, 100)])
def test_every_small_step_finds_the_smallest_bucket(seqs: int, tokens: int) -> None:
    buckets = Buckets(seqs, tokens)
    assert len(set(buckets.all)) == len(buckets.all) == len(buckets.decode) + len(buckets.mixed)
    assert all(b.rows <= b.tokens <= max(2, min(512, tokens)) for b in buckets.all)
    rng = random.Random(0)
    for _ in range(300):
        rows = rng.randint(1, min(seqs, tokens))
        total = rng.choice([rows, rng.randint(rows, tokens)])
        samples = rng.randint(0, seqs) if rng.random() < 0.2 else rows
        found = buckets.find(total, rows, samples)
        fits = [b for b in buckets.all if b.tokens >= total and b.rows >= max(rows, samples)]
        assert (found is None) == (not fits)
        assert found is None or found.tokens == min(b.tokens for b in fits)
    assert buckets.find(513, 1, 1) is None


def test_views_cover_the_buffer_once() -> None:
    for bucket in (Bucket(1, 1), Bucket(16, 8), Bucket(8, 8)):
        buffer = torch.arange(num_words(bucket))
        parts = torch.cat([part.reshape(-1) for part in views(buffer, bucket)])
        assert torch.equal(parts, buffer)
    small, large = (views(torch.arange(500), Bucket(n, 8)) for n in (8, 32))
    assert torch.equal(small.knobs, large.knobs) and torch.equal(small.forced, large.forced)


def test_only_new_pages_are_sent() -> None:
    tables = PageTables(4, 10, torch.device("cpu"))
    held, other = [3, 1], [9]
    rows = [BatchRow(2, [0], False, 0, 0, held), BatchRow(0, [0], False, 0, 0, other)]
    assert tables.update(rows) == 3 and tables.update(rows) == 0
    held.append(5)
    assert tables.update(rows) == 1
    assert tables.table[2, :3].tolist() == [3, 1, 5] and tables.table[0, 0] == 9
    rows[0].pages = [5, 3]  # a fold took the first page out: another list
    assert tables.update(rows) == 2 and tables.table[2, :2].tolist() == [5, 3]
    assert not tables.table[4].any()


@pytest.mark.parametrize("draws", Draws)
def test_fixed_draws_equal_the_sampler_s(pair: tuple[ModelRunner, ModelRunner], draws: Draws) -> None:
    """Each kind of draws can do with the rows of the kinds below it, too."""
    from thinkfold.runner.graph_inputs import Packer, fixed, pack_samples
    from thinkfold.runner.sampler import SamplerInputs, draws_of
    from thinkfold.runner.transfer import to_device

    sampler = pair[0]._sampler
    rng, gen = random.Random(1), torch.Generator().manual_seed(2)
    options = {
        Draws.GREEDY: [GREEDY],
        Draws.FREE: [GREEDY, SamplingParams(temperature=0.6), SamplingParams(temperature=2.0)],
        Draws.FILTERED: [
            GREEDY,
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.6, top_p=0.95),
            SamplingParams(temperature=1.5, top_k=5),
            SamplingParams(temperature=1.0, min_p=0.2),
            SamplingParams(temperature=1.0, top_p=0.3, top_k=VOCAB - 1),
            FILTERED,
        ],
    }[draws]
    for trial in range(40):
        count = rng.randint(1, SEQS)
        samples = [SampleRow(i, rng.choice(options), trial, i, 3, ban_eos=rng.random() < 0.3) for i in range(count)]
        raw = torch.randn(SEQS, VOCAB, generator=gen) * 2
        if trial % 4 == 0:
            raw = raw.round()  # equal logits
        bucket = Bucket(SEQS, SEQS)
        buffer = Packer(PAGE, VOCAB, SEQS, 0).blank(bucket).copy()
        pack_samples(views(buffer, bucket), samples, sampler)
        inputs = fixed(views(torch.from_numpy(buffer), bucket))
        expected = sampler.sample(raw[:count], samples, SamplerInputs(*to_device(sampler.pack(samples), raw.device)))
        ids, stats = sampler.sample_fixed(raw.clone(), inputs, draws)
        assert draws_of(samples).value <= draws.value
        assert torch.equal(ids[:count], expected.token_ids)
        torch.testing.assert_close(stats[:count], expected.stats, equal_nan=True)


def test_eager_is_the_choice_of_the_configuration(config: EngineConfig, loaded: LoadedModel, tmp_path: Path) -> None:
    from thinkfold.runner.model_runner import _own_capture

    gpu = torch.device("cuda")
    assert _own_capture(EngineConfig(enforce_eager=True), gpu) is None
    assert _own_capture(EngineConfig(attention_backend="reference"), gpu) is None
    assert _own_capture(config, torch.device("cpu")) is None
    assert ModelRunner(config, loaded=loaded).graphs is None
