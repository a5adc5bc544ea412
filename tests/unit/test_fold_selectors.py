"""Every selector found in the folder against the same rules; then what is special to each."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_fold_compaction import HEADS, LAYERS, SCALE, TOKENS, make_segments, random

from thinkfold.cli import bench
from thinkfold.errors import ParameterError
from thinkfold.fold import selectors
from thinkfold.fold.compaction import local_attention, uniform_budget
from thinkfold.fold.segments import Segments, Summary, attend, join, raw_entries

DOCS = Path(__file__).parents[2] / "docs" / "folding.md"
NAMES = selectors.names()
KEEPING = sorted(set(NAMES) - {"drop"})
RAGGED = torch.tensor([[0, 3, 40], [16, 7, 1]])


def select(name: str, segments: Segments, budget: torch.Tensor) -> Summary:
    return selectors.create(name).select(segments, budget)


def outputs(segments: Segments, summary: Summary) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(segments.queries, summary.entries(segments.keys, segments.values), SCALE)


def test_the_methods_of_the_design_are_there() -> None:
    assert {
        "conclusion_attention",
        "attention_matching",
        "attention_pooling",
        "segment_mean",
        "ema",
        "kmeans",
        "snap",
        "rkv",
        "streaming",
        "drop",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_names_its_source(name: str) -> None:
    text = inspect.getdoc(type(selectors.create(name)))
    assert text is not None and "Source:" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [uniform_budget(LAYERS, HEADS, 8), RAGGED, uniform_budget(LAYERS, HEADS, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_honoured_and_no_index_comes_twice(name: str, budget: torch.Tensor, dtype: torch.dtype) -> None:
    segments = make_segments(dtype)
    summary = select(name, segments, budget)
    assert (summary.counts <= budget).all()
    for kept in summary.indices.flatten(0, 2).tolist():
        real = [j for j in kept if j >= 0]
        assert real == sorted(set(real)) and kept[len(real) :] == [-1] * (len(kept) - len(real))
        assert all(0 <= j < TOKENS for j in real)
    entries = summary.entries(segments.keys, segments.values)
    assert entries.keys.dtype == entries.values.dtype == dtype
    assert entries.keys.isfinite().all() and entries.values.isfinite().all()
    assert not entries.bias.isnan().any() and not torch.isposinf(entries.bias).any()
    assert outputs(segments, summary)[0].isfinite().all()


@pytest.mark.parametrize("name", KEEPING)
def test_the_budget_is_spent(name: str) -> None:
    counts = select(name, make_segments(), RAGGED).counts
    assert torch.equal(counts, RAGGED.expand_as(counts))


@pytest.mark.parametrize("name", KEEPING)
def test_keeping_everything_is_the_identity(name: str) -> None:
    segments = make_segments()
    rest = raw_entries(random(2, LAYERS, HEADS, 10, 8, seed=3), random(2, LAYERS, HEADS, 10, 8, seed=4))
    raw = attend(segments.queries, rest, SCALE)
    full = join([raw, attend(segments.queries, raw_entries(segments.keys, segments.values), SCALE)])
    folded = join([raw, outputs(segments, select(name, segments, uniform_budget(LAYERS, HEADS, TOKENS)))])
    for got, wanted in zip(folded, full, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_is_near_double(name: str) -> None:
    budget = uniform_budget(LAYERS, HEADS, 10)
    double, single = make_segments(torch.float64), make_segments(torch.float32)
    wanted, got = outputs(double, select(name, double, budget)), outputs(single, select(name, single, budget))
    torch.testing.assert_close(got[0].double(), wanted[0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", KEEPING)
def test_logits_far_below_zero_leave_numbers(name: str) -> None:
    """Keys of some models have a channel of large numbers, which a softmax does not see."""
    near = make_segments()
    keys, queries = near.keys.clone(), near.queries.clone()
    keys[..., 0], queries[..., 0] = -300.0, 20.0
    shift = (keys[..., :1, 0] * queries[..., 0] - near.queries[..., 0] * near.keys[..., :1, 0]) * SCALE
    lse = near.context_lse + shift[..., : near.context_lse.shape[-1]]
    far = replace(near, keys=keys, queries=queries, context_lse=lse)
    far = replace(far, **{field: getattr(far, field).float() for field in ("keys", "values", "queries", "context_lse")})
    output, lse = outputs(far, select(name, far, RAGGED))
    empty = RAGGED == 0
    assert output[:, ~empty].isfinite().all() and lse[:, ~empty].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_heads_do_not_know_each_other(name: str) -> None:
    segments, order = make_segments(), [2, 0, 1]
    swapped = replace(
        segments,
        keys=segments.keys[:, :, order],
        values=segments.values[:, :, order],
        queries=segments.queries[:, :, order],
        context_lse=segments.context_lse[:, :, order],
    )
    out, lse = outputs(segments, select(name, segments, RAGGED))
    other_out, other_lse = outputs(swapped, select(name, swapped, RAGGED[:, order]))
    torch.testing.assert_close(other_out, out[:, :, order])
    torch.testing.assert_close(other_lse, lse[:, :, order])


@pytest.mark.parametrize("name", NAMES)
def test_folds_of_a_batch_do_not_know_each_other(name: str) -> None:
    segments = make_segments()
    alone = replace(
        segments,
        keys=segments.keys[1:],
        values=segments.values[1:],
        queries=segments.queries[1:],
        context_lse=segments.context_lse[1:],
    )
    together, single = (outputs(s, select(name, s, RAGGED)) for s in (segments, alone))
    torch.testing.assert_close(together[0][1:], single[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "budget",
    [
        uniform_budget(LAYERS, HEADS, TOKENS + 1),
        uniform_budget(LAYERS, HEADS, -1),
        uniform_budget(LAYERS, HEADS + 1, 4),
        uniform_budget(LAYERS, HEADS, 4).double(),
    ],
)
def test_a_wrong_budget_is_refused(name: str, budget: torch.Tensor) -> None:
    with pytest.raises(ParameterError, match="budget"):
        select(name, make_segments(), budget)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ParameterError, match="there is no 'best', there are attention_matching"):
        selectors.create("best")
    with pytest.raises(ParameterError, match="drop has no option size"):
        selectors.create("drop", size=3)


def test_a_new_file_is_a_new_selector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(inspect.getmodule(type(selectors.create("streaming"))))
    (tmp_path / "twice_streaming.py").write_text(source)
    (tmp_path / "no_selector.py").write_text('"""Empty."""')
    monkeypatch.setattr(selectors, "__path__", [*selectors.__path__, str(tmp_path)])
    assert set(selectors.names()) == {*NAMES, "twice_streaming", "no_selector"}
    assert select("twice_streaming", make_segments(), RAGGED).counts.sum() == 2 * RAGGED.sum()
    with pytest.raises(TypeError, match="one class with select"):
        selectors.create("no_selector")


def test_ours_keeps_the_conclusion_first() -> None:
    summary = select("conclusion_attention", make_segments(), uniform_budget(LAYERS, HEADS, 20))
    assert torch.equal(summary.indices[..., -16:], torch.arange(24, 40).expand(2, LAYERS, HEADS, 16))
    short = select("conclusion_attention", make_segments(), uniform_budget(LAYERS, HEADS, 3))
    assert short.indices[0, 0, 0].tolist() == [37, 38, 39]
    assert summary.pooled is None


def test_a_conclusion_is_kept_where_its_segment_ends_and_not_where_the_pages_do() -> None:
    """One end lies 5 tokens inside the fold, the other 7 behind it: the rest of that conclusion is the next fold's."""
    segments = replace(make_segments(), ends=(5, 47))
    indices = select("conclusion_attention", segments, uniform_budget(LAYERS, HEADS, 14)).indices
    assert torch.equal(indices, torch.tensor([*range(5), *range(31, 40)]).expand_as(indices))
    more = select("conclusion_attention", segments, uniform_budget(LAYERS, HEADS, 16)).indices
    assert all({*range(5), *range(31, 40)} < set(row) for row in more.flatten(0, 2).tolist())
    none = select("conclusion_attention", replace(segments, ends=()), uniform_budget(LAYERS, HEADS, 14)).indices
    assert not torch.equal(none, indices)


def test_a_head_with_mass_keeps_what_its_average_was() -> None:
    """Queries that look at everything alike: no few exact copies carry that, one pooled entry does."""
    segments = make_segments(torch.float64)
    segments = replace(segments, queries=segments.queries * 1e-3, context_lse=segments.context_lse.clamp(min=9.0))
    budget, mass = uniform_budget(LAYERS, HEADS, 9), [0, 1] + [0] * (LAYERS * HEADS - 3) + [3]
    exact = select("conclusion_attention", segments, budget)
    summary = selectors.create("conclusion_attention", conclusion=4, mass=mass).select(segments, budget)
    assert torch.equal(summary.counts, budget.expand_as(summary.counts)) and summary.pooled is not None
    made = summary.pooled.bias.isfinite().sum(-1)
    assert torch.equal(made, torch.tensor(mass).view(LAYERS, HEADS).expand_as(made))
    full, lse = attend(segments.queries, raw_entries(segments.keys, segments.values), SCALE)
    errors, masses = [], []
    for kept in (exact, summary):
        out, folded = outputs(segments, kept)
        errors.append((out - full).norm(dim=-1).mean((0, 3)))
        masses.append((folded - lse).abs().mean((0, 3)))
    for layer, head in ((0, 1), (LAYERS - 1, HEADS - 1)):
        assert masses[1][layer, head] < 1e-2 < 1.0 < masses[0][layer, head]
        assert errors[1][layer, head] < 0.7 * errors[0][layer, head]


@pytest.mark.parametrize("name", ["conclusion_attention", "snap", "kmeans", "attention_matching", "rkv"])
def test_a_token_that_all_queries_look_at_stays(name: str) -> None:
    segments = make_segments()
    keys, values = segments.keys.clone(), segments.values
    keys[..., 11, :] = 4.0 * segments.queries.mean(-2) / segments.queries.mean(-2).norm(dim=-1, keepdim=True)
    queries = segments.queries + 6.0 * keys[..., 11:12, :]
    needle = replace(segments, keys=keys, queries=queries, context_lse=(queries @ keys.mT * SCALE).logsumexp(-1))
    out, _ = outputs(needle, select(name, needle, uniform_budget(LAYERS, HEADS, 20)))
    torch.testing.assert_close(out, values[..., 11:12, :].expand_as(out), atol=0.05, rtol=0.05)


def test_snap_equals_a_naive_one() -> None:
    segments = make_segments()
    shares, _ = local_attention(segments.late_queries, segments.keys, SCALE)
    mean = shares.mean(-2)[0, 0, 0].tolist()
    smooth = [sum(mean[max(0, j - 2) : j + 3]) / len(mean[max(0, j - 2) : j + 3]) for j in range(TOKENS)]
    best = sorted(sorted(range(TOKENS), key=lambda j: -smooth[j])[:8])
    assert select("snap", segments, uniform_budget(LAYERS, HEADS, 8)).indices[0, 0, 0].tolist() == best


def test_rkv_finds_copies_redundant_but_the_newest() -> None:
    segments = make_segments()
    keys = torch.eye(TOKENS, dtype=torch.float64)[:, :TOKENS].expand(2, LAYERS, HEADS, TOKENS, TOKENS).clone()
    keys[..., [15, 25], :] = keys[..., 5:6, :]
    queries = random(*segments.queries.shape[:-1], TOKENS, seed=50)
    copies = replace(segments, keys=keys, values=keys, queries=queries)
    kept = selectors.create("rkv", mix=0.0).select(copies, uniform_budget(LAYERS, HEADS, TOKENS - 2)).indices
    for row in kept.flatten(0, 2).tolist():
        assert sorted(set(range(TOKENS)) - set(row)) == [5, 15]


def test_streaming_keeps_both_ends() -> None:
    indices = select("streaming", make_segments(), uniform_budget(LAYERS, HEADS, 6)).indices
    assert indices[0, 0, 0].tolist() == [0, 1, 2, 3, 38, 39]


def test_means_are_means_with_their_mass() -> None:
    segments = make_segments()
    pooled = select("segment_mean", segments, uniform_budget(LAYERS, HEADS, 4)).pooled
    assert pooled is not None
    torch.testing.assert_close(pooled.keys[..., 1, :], segments.keys[..., 10:20, :].mean(-2))
    torch.testing.assert_close(pooled.bias.exp(), torch.full_like(pooled.bias, 10.0))


def test_ema_leans_to_the_end_of_a_stretch() -> None:
    segments = make_segments()
    ramp = torch.arange(TOKENS, dtype=torch.float64).unsqueeze(-1).expand_as(segments.values)
    pooled = select("ema", replace(segments, values=ramp), uniform_budget(LAYERS, HEADS, 4)).pooled
    assert pooled is not None
    read = pooled.values[0, 0, 0, :, 0].tolist()
    running, alpha, wanted = 0.0, 2 / 11, []
    total = 0.0
    for j in range(TOKENS):
        running, total = j + (1 - alpha) * running, 1 + (1 - alpha) * total
        if j % 10 == 9:
            wanted.append(running / total)
    assert read == pytest.approx(wanted) and all(a < b for a, b in pairwise(read))


def test_kmeans_finds_clusters() -> None:
    segments = make_segments()
    centres = 8.0 * random(2, LAYERS, HEADS, 4, 8, seed=40)
    keys = centres.repeat_interleave(10, dim=-2) + 0.01 * random(2, LAYERS, HEADS, TOKENS, 8, seed=41)
    pooled = select("kmeans", replace(segments, keys=keys), uniform_budget(LAYERS, HEADS, 9)).pooled
    assert pooled is not None
    distance = torch.cdist(pooled.keys, centres).amin(-1)
    assert distance.max() < 0.05


def test_docs_name_every_selector() -> None:
    assert set(NAMES) <= set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))


def test_the_examples_of_the_docs_run(tmp_path: Path) -> None:
    call, own = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(call, names)
    assert names["folded"].shape == names["queries"].shape
    (tmp_path / "value_norm.py").write_text(own)
    value_norm = bench.load(tmp_path / "value_norm.py").ValueNorm()
    segments = make_segments()
    kept = value_norm.select(segments, uniform_budget(LAYERS, HEADS, 1)).indices
    assert torch.equal(kept, segments.values.norm(dim=-1).argmax(-1, keepdim=True))
