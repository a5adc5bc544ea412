"""Scheduler, planner, memory and model together, against full forwards in which exactly what left is masked.

Folds drop everything, so what a token may see is known: all before it but the spans that were folded or offloaded
before it was computed. Positions, tables, windows, forks, preemption and swaps must all be right for that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make_request
from fold_branch import Branch as HandBranch
from fold_branch import Places, feed, fold, worst
from test_scheduler_folds import Thinker
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from thinkfold.config import EngineConfig
from thinkfold.fold.planner import FoldPlanner
from thinkfold.kv.manager import KVManager
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import AtAnswer, FoldMode, FoldPolicy, FoldProfile, Phase

PAGE, WINDOW = 8, 20
NUMBERS = FoldProfile(max_segment_tokens=32, min_segment_tokens=8, fold_delay=6, keep_raw_tokens=8, entries=4)
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "half windowed": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
WINDOWS = ("qwen3", "mistral", "half windowed")  # no layer has one, all have, one has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@dataclass
class Case:
    """One model with a scheduler of `pages` device pages, and what has left of each branch by its order."""

    folder: Path
    family: str
    pages: int = 200
    host_pages: int = 0
    left: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)  # span: position from which it is gone
    known: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    seen: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)  # (position, log-probs)

    def __post_init__(self) -> None:
        kind, changes = FAMILIES[self.family]
        self.path = self.folder / self.family.replace(" ", "-")
        if not self.path.exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, **changes})).save_pretrained(
                self.path
            )
        page_bytes = 2 * 2 * 2 * PAGE * 8 * 4
        options: dict[str, Any] = {"device": "cpu", "page_size": PAGE, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        config = EngineConfig(
            model=str(self.path),
            kv_cache_bytes=self.pages * page_bytes,
            swap_space_bytes=self.host_pages * page_bytes,
            **options,
        )
        self.runner = runner = ModelRunner(config)
        assert runner.num_pages == self.pages and runner.host_pages == self.host_pages
        assert runner.window == (WINDOW if self.family in ("mistral", "half windowed") else 0)
        heads = runner.num_layers * runner.num_kv_heads
        kv = KVManager(
            self.pages, PAGE, enable_prefix_caching=True, num_heads=heads, reserve_pages=1, host_pages=self.host_pages
        )
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            fold_counts=lambda entries, tokens: runner.budgets.counts(entries, tokens, PAGE),
        )

    def branches(self, number: int, length: int, answer: int, policy: FoldPolicy, n: int = 1) -> list[Branch]:
        """A request of `n` choices that think for `length - answer` tokens."""
        rng = random.Random(number)
        prompt = [rng.randrange(2, 97) for _ in range(rng.randrange(5, 30))]
        request = make_request(
            str(number),
            prompt,
            phase=Phase.THINKING,
            max_tokens=length,
            temperature=0.9,
            seed=number,
            logprobs=20,
            ignore_eos=True,
            n=n,
        )
        made = []
        for index in range(n):
            steering = Thinker(length, phase=Phase.THINKING)
            steering.answer = answer
            planner = FoldPlanner(policy, PAGE, len(prompt), self.runner.window, NUMBERS)
            made.append(Branch(request, index, number * 10 + index, steering, list(prompt), folding=planner))
        return made

    def run(self, requests: list[list[Branch]], limit: int = 3000) -> None:
        """To the end of all branches, one step at a time."""
        scheduler = self.scheduler
        for branches in requests:
            scheduler.add(branches)
        while any(b.status is not BranchStatus.FINISHED for branches in requests for b in branches):
            limit -= 1
            assert limit, "not finished"
            plan = scheduler.plan()
            assert plan is not None and not scheduler.ended
            self._note({row.slot: row.position for row in plan.rows})
            result = self.runner.collect(self.runner.launch(plan))
            assert not result.fold_faults
            for fold_id, error in result.fold_errors:
                scheduler.folds.judge(fold_id, error)
            draws = scheduler.collect(plan.step)
            for (branch, wanted), token, logprobs in zip(draws, result.token_ids, result.logprobs, strict=True):
                if not wanted:
                    continue
                self.seen.setdefault(branch.order, []).append((len(branch.token_ids), logprobs))
                branch.token_ids.append(token)
                branch.steering.outputs += 1
                if branch.steering.outputs >= branch.steering.length:
                    scheduler.finish(branch)
            scheduler.check_integrity()

    def _note(self, positions: dict[int, int]) -> None:
        """What left with the plan just made is gone for its row, and at the same position when computed again."""
        for branch in self.scheduler.running:
            assert branch.folding is not None
            now, left = set(branch.folding.folded), self.left.setdefault(branch.order, {})
            for span in now - self.known.get(branch.order, set()):
                since = positions.get(branch.slot, branch.num_computed_tokens)
                assert left.setdefault(span, since) == since
            self.known[branch.order] = now

    def worst(self, branches: list[Branch]) -> float:
        """The largest difference of a log-prob among the 20 most likely tokens from a masked full forward."""
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval()
        gap = 0.0
        for branch in branches:
            ids = torch.tensor([branch.token_ids])
            masks = self._masks(len(branch.token_ids), self.left[branch.order])
            with torch.no_grad():
                reference = model(ids, attention_mask=masks).logits[0].log_softmax(-1)
            assert len(self.seen[branch.order]) == len(branch.output_ids)
            for position, logprobs in self.seen[branch.order]:
                row = reference[position - 1]
                gap = max(gap, *(abs(value - float(row[token])) for token, value in logprobs.top))
        return gap

    def _masks(self, length: int, left: dict[tuple[int, int], int]) -> Tensor | dict[str, Tensor]:
        full = torch.ones(length, length, dtype=torch.bool).tril()
        for (start, end), since in left.items():
            full[since:, start:end] = False
        near = full & ~torch.ones(length, length, dtype=torch.bool).tril(-WINDOW)
        masks = {
            kind: torch.zeros(length, length).masked_fill_(~visible, torch.finfo(torch.float32).min)[None, None]
            for kind, visible in (("full_attention", full), ("sliding_attention", near))
        }
        if self.family == "half windowed":
            return masks
        return masks["sliding_attention" if self.family == "mistral" else "full_attention"]


def policy(mode: FoldMode, at_answer: AtAnswer = AtAnswer.KEEP) -> FoldPolicy:
    return FoldPolicy(mode, selector="drop", entries=0, at_answer=at_answer)


def flat(requests: list[list[Branch]]) -> list[Branch]:
    return [branch for branches in requests for branch in branches]


@pytest.mark.parametrize(
    ("family", "host_pages"),
    [*((family, 0) for family in FAMILIES), *((family, 100) for family in WINDOWS)],
    ids=[*(f"{family}-preempted" for family in FAMILIES), *(f"{family}-swapped" for family in WINDOWS)],
)
def test_case_43_several_folds_then_forks_preemption_and_swaps(folder: Path, family: str, host_pages: int) -> None:
    case = Case(folder, family, pages=22, host_pages=host_pages)
    eager = policy(FoldMode.EAGER)
    requests = [case.branches(1, 110, 0, eager), case.branches(2, 90, 0, eager, n=2), case.branches(3, 100, 0, eager)]
    case.run(requests)
    assert case.scheduler.pressure["swap" if host_pages else "preempt"] > 0
    assert all(len(case.left[branch.order]) >= 3 for branch in flat(requests))
    assert case.worst(flat(requests)) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [FoldMode.OFF, FoldMode.EAGER])
def test_case_43_after_recycling_the_answers_logits_are_exact_too(folder: Path, family: str, mode: FoldMode) -> None:
    case = Case(folder, family)
    recycles = policy(mode, AtAnswer.RECYCLE)
    requests = [case.branches(1, 110, 50, recycles), case.branches(2, 90, 40, recycles, n=2)]
    case.run(requests)
    assert case.scheduler.pressure.total() == 0
    for branch in flat(requests):
        assert branch.folding is not None
        answer = branch.num_prompt_tokens + branch.steering.thinking
        left = case.left[branch.order]
        assert any(since >= answer for since in left.values()), "something left when the answer had begun"
        assert mode is FoldMode.EAGER or all(since >= answer for since in left.values())
    assert case.worst(flat(requests)) <= 1e-4


@pytest.mark.parametrize("family", ["qwen3", "half windowed"])
def test_case_43_after_thinking_was_swapped_for_the_answer_its_logits_are_exact(folder: Path, family: str) -> None:
    case = Case(folder, family, host_pages=60)
    requests = [case.branches(i, 110, 50, policy(FoldMode.OFF, AtAnswer.SWAP)) for i in range(3)]
    case.run(requests)
    assert case.scheduler.folds.totals["offloads"] >= 3 and case.scheduler.folds.totals["folds"] == 0
    assert case.worst(flat(requests)) <= 1e-4


def test_case_43_recycled_answers_are_exact_after_preemption(folder: Path) -> None:
    case = Case(folder, "qwen3", pages=30)
    requests = [case.branches(i, 110, 50, policy(FoldMode.OFF, AtAnswer.RECYCLE)) for i in range(3)]
    case.run(requests)
    assert case.scheduler.pressure["preempt"] > 0
    assert case.worst(flat(requests)) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_selector_that_keeps_everything_is_no_folding(folder: Path, family: str) -> None:
    case, rng = Case(folder, family), random.Random(7)
    one = HandBranch(case.runner, Places(case.runner, PAGE), 0, [rng.randrange(97) for _ in range(150)])
    results = feed(one, 70)
    for pages in (3, 1):
        done, error = fold(one, 1, pages, "conclusion_attention", pages * PAGE)
        results |= done | feed(one, 20)
        assert error < 1e-4
    model = AutoModelForCausalLM.from_pretrained(case.path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        masks = case._masks(one.computed, {})
        reference = model(torch.tensor([one.ids[: one.computed]]), attention_mask=masks).logits[0].log_softmax(-1)
    assert worst(results, reference) <= 1e-4
    assert one.kv_len == one.computed - 4 * PAGE and one.summary.lengths == [4 * PAGE] * 4
