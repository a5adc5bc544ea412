"""The sampler: distributions, filters, penalties, seeds, statistics and broken rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thinkfold.runner import filters, rng
from thinkfold.runner.sampler import Drawn, Sampler, SamplerInputs
from thinkfold.scheduler.output import SampleRow
from thinkfold.types import SamplingParams

VOCAB = 64
EOS = (3, 9)
CPU = torch.device("cpu")


def sampler(vocab: int = VOCAB, end_marker_id: int | None = 5) -> Sampler:
    return Sampler(vocab, 16, EOS, end_marker_id, CPU)


def row(slot: int = 0, seed: int = 7, branch: int = 0, position: int = 0, **options: Any) -> SampleRow:
    own = {name: options.pop(name) for name in ("ban_eos", "forced_token", "history") if name in options}
    return SampleRow(slot, SamplingParams(**options), seed, branch, position, **own)


def draw(s: Sampler, logits: Tensor, rows: list[SampleRow]) -> Drawn:
    packed = SamplerInputs(*(torch.from_numpy(np.ascontiguousarray(a)) for a in s.pack(rows)))
    return s.sample(logits, rows, packed)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, ties: bool = False) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return (logits * 2).round() / 2 if ties else logits


def naive_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Top-k, then top-p renormalised, then min-p, in plain Python."""
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if 0 < params.top_k < len(weights):
        order = order[: params.top_k]
    total, before, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if params.top_p < 1.0 and before >= params.top_p * total:
            break
        kept.append(i)
        before += weights[i]
    return {i for i in kept if weights[i] >= params.min_p}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [7, VOCAB, 1000])
def test_filters_keep_exactly_the_naive_sets(vocab: int, ties: bool) -> None:
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.3, 1.0, 2.0)
        for k in (0, -1, 1, 5, 40)
        for p in (1.0, 0.9, 0.35, 1e-6)
        for m in (0.0, 0.05)
    ]
    logits = random_logits(len(params), vocab, ties=ties)
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    weights = torch.exp((logits - logits.amax(1, keepdim=True)).double() / temperature[:, None])
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    top_p, min_p = (torch.tensor([getattr(p, n) for p in params], dtype=torch.float64) for n in ("top_p", "min_p"))
    together = filters.kept(weights, top_k, top_p, min_p, params)
    for i, p in enumerate(params):
        one = slice(i, i + 1)
        alone = filters.kept(weights[one], top_k[one], top_p[one], min_p[one], [p])
        expected = naive_kept(logits[i].tolist(), p)
        assert together is not None and set(together[i].nonzero()[:, 0].tolist()) == expected, p
        assert (set(range(vocab)) if alone is None else set(alone[0].nonzero()[:, 0].tolist())) == expected, p


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1, "temperature": 1.5}],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    """Chi-square of 4,000 draws with fixed seeds against the filtered softmax."""
    logits, count = random_logits(1, 12, seed=3), 4000
    params = SamplingParams(**options)  # type: ignore[arg-type]
    kept = naive_kept(logits[0].tolist(), params)
    weights = {i: math.exp(float(logits[0, i]) / params.temperature) for i in kept}
    total = sum(weights.values())
    s = Sampler(12, 16, EOS, None, CPU)
    seen: Counter[int] = Counter()
    for start in range(0, count, 500):
        rows = [SampleRow(0, params, 11, 0, start + i) for i in range(500)]
        seen.update(draw(s, logits.expand(500, -1), rows).token_ids.tolist())
    assert set(seen) <= kept
    cells = [(seen[i], count * w / total) for i, w in weights.items() if count * w / total >= 5]
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [20, 40]] = 3.0
    assert draw(sampler(), logits, [row(temperature=0.0), row(temperature=0.0)]).token_ids.tolist() == [0, 20]


def test_case_34_branches_differ_repeats_agree_neighbours_change_nothing() -> None:
    logits = random_logits(1, seed=5)

    def text(branch: int, neighbours: int, seed: int = 7) -> list[int]:
        tokens = []
        for position in range(16):
            rows = [
                row(i, seed=100 + i, position=position, temperature=0.3 + i / 5, top_p=0.5) for i in range(neighbours)
            ]
            rows.insert(neighbours // 2, row(9, seed=seed, branch=branch, position=position))
            batch = random_logits(len(rows), seed=position)
            batch[neighbours // 2] = logits[0]
            tokens.append(int(draw(sampler(), batch, rows).token_ids[neighbours // 2]))
        return tokens

    alone = [text(branch, 0) for branch in range(4)]
    assert len({tuple(t) for t in alone}) == 4
    assert alone == [text(branch, 0) for branch in range(4)]
    assert alone == [text(branch, 1 + branch) for branch in range(4)]
    assert text(0, 0, seed=8) != alone[0]


def test_random_numbers_are_a_fixed_function() -> None:
    assert rng.uniform(0, 0, 0) == rng.uniform(0, 0, 0)
    words = [(s, b, p) for s in (0, 1, -1, 2**63 - 1, -(2**63)) for b in (0, 1) for p in (0, 1, 10**6)]
    numbers = [rng.uniform(*w) for w in words]
    assert len(set(numbers)) == len(words)
    assert all(0 <= u < 1 and u * 2**53 == int(u * 2**53) for u in numbers)
    many = [rng.uniform(1, 0, p) for p in range(4000)]
    assert abs(sum(many) / 4000 - 0.5) < 0.02
    pairs = np.corrcoef(many[:-1], many[1:])[0, 1]
    assert abs(pairs) < 0.05


def test_an_end_of_the_unit_interval_never_draws_a_dropped_token() -> None:
    logits = torch.full((2, 8), -torch.inf)
    logits[:, [2, 5]] = 0.0
    knobs = torch.tensor([[1.0, 1.0], [0.0, 1 - 2**-53], [1.0, 1.0], [0.0, 0.0], [8.0, 8.0]], dtype=torch.float64)
    assert filters.draw(logits, knobs, [SamplingParams()] * 2).tolist() == [2, 5]


def naive_penalties(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    counts, result = Counter(output), []
    for i, x in enumerate(logits):
        if i in counts or i in prompt:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        result.append(x - p.frequency_penalty * counts[i] - p.presence_penalty * (counts[i] > 0))
    return result


def test_penalties_equal_a_naive_version_after_each_token_and_a_rebuild() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
    prompt, output, s = [1, 2, 2, 60], [8, 8, 2], sampler()
    history: tuple[list[int], list[int]] | None = (prompt, list(output))
    for step in range(40):
        logits = random_logits(2, seed=step) / 4
        plain = row(1, temperature=0.0)
        drawn = draw(s, logits, [plain, SampleRow(0, params, 0, 0, step, history=history)])
        expected = naive_penalties(logits[1].tolist(), params, prompt, output)
        token = int(drawn.token_ids[1])
        assert token == max(range(VOCAB), key=lambda i: (round(expected[i], 5), -i))
        assert int(drawn.token_ids[0]) == int(logits[0].argmax())
        assert float(drawn.stats[1, 0]) == pytest.approx(float(logits[1].log_softmax(0)[token]), abs=1e-5)
        output.append(token)
        history = None
        if step == 20:  # another request takes the slot, then this one comes back
            draw(s, logits[:1], [SampleRow(0, params, 0, 0, 0, history=([5, 6], [7, 7, 7]))])
            history = (prompt, list(output))


def test_penalties_apply_to_logits_not_only_to_the_winner() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.2)
    prompt, output = [0, 4], [6, 6, 7]
    logits, s = random_logits(1, seed=2), sampler()
    penalised = torch.tensor(naive_penalties(logits[0].tolist(), params, prompt, output))[None]
    for position in range(50):
        a = draw(s, logits, [SampleRow(0, params, 3, 0, position, history=(prompt, output))])
        b = draw(sampler(), penalised, [row(seed=3, position=position)])
        assert a.token_ids.tolist() == b.token_ids.tolist()


def test_ban_eos_bars_eos_and_that_rows_stop_ids_only() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 20], logits[:, 9], logits[:, 30] = 9.0, 8.0, 7.0, 6.0
    rows = [
        row(temperature=0.0, ban_eos=True, stop_token_ids=(20,)),
        row(temperature=0.0, ban_eos=True),
        row(temperature=0.0, stop_token_ids=(20,)),
    ]
    assert draw(sampler(), logits, rows).token_ids.tolist() == [30, 20, 3]


def test_case_52_logit_bias_leaves_neighbours_alone() -> None:
    logits = random_logits(3, seed=9)
    before = logits.clone()
    plain = [row(i, position=i, temperature=1.0) for i in range(3)]
    expected = draw(sampler(), logits, plain)
    biased = [plain[0], row(1, temperature=0.0, logit_bias={17: 100.0, 0: -100.0}), plain[2]]
    got = draw(sampler(), logits, biased)
    assert got.token_ids.tolist() == [int(expected.token_ids[0]), 17, int(expected.token_ids[2])]
    assert torch.equal(got.stats[[0, 2]], expected.stats[[0, 2]])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    logits = random_logits(4, seed=1)
    rows = [
        row(i, position=i, temperature=t, top_p=p, top_k=k)
        for i, (t, p, k) in enumerate([(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 0.9, 4)])
    ]
    expected = draw(sampler(), logits, rows).token_ids.tolist()
    for broken in range(4):
        poisoned = logits.clone()
        poisoned[broken, 11] = value
        wanted = [-1 if i == broken else token for i, token in enumerate(expected)]
        assert draw(sampler(), poisoned, rows).token_ids.tolist() == wanted


def test_statistics_are_of_raw_logits() -> None:
    logits = random_logits(2, seed=4)
    rows = [row(temperature=0.0, logit_bias={7: 100.0}), row(forced_token=12, logprobs=3)]
    drawn = draw(sampler(end_marker_id=5), logits, rows)
    logp = logits.double().log_softmax(-1)
    assert drawn.token_ids.tolist() == [7, 12]
    for i, token in enumerate([7, 12]):
        best = logp[i].topk(20).values
        expected = [logp[i, token], -(logp[i].exp() * logp[i]).sum(), -best.mean(), best[0] - logp[i, 5]]
        assert drawn.stats[i].tolist() == pytest.approx([float(x) for x in expected], abs=1e-5)
    assert drawn.top_ids.tolist() == [logp[1].topk(3).indices.tolist()]
    assert drawn.top_logprobs[0].tolist() == pytest.approx(logp[1].topk(3).values.tolist(), abs=1e-5)
    assert draw(sampler(end_marker_id=None), logits, rows).stats[:, 3].isnan().all()


def test_a_forced_token_uses_no_random_number_of_others() -> None:
    logits = random_logits(2, seed=6)
    free = row(1, position=4)
    alone = draw(sampler(), logits[1:], [free]).token_ids[0]
    both = draw(sampler(), logits, [replace(free, slot=0, forced_token=2), free])
    assert both.token_ids.tolist() == [2, int(alone)]
