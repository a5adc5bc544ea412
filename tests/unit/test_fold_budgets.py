"""Budgets by head: whole blocks, never more than asked for, a table of the right shape or an error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from thinkfold.errors import ParameterError
from thinkfold.fold.budgets import FoldBudgets, apportion, blend, write

LAYERS, HEADS = 3, 2


def table(conclusion: int = 16) -> FoldBudgets:
    return FoldBudgets(LAYERS, HEADS, (0.0, 0.5, 3.0, 1.5, 1.0, 0.0), conclusion)


@pytest.mark.parametrize("conclusion", [0, 16])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
def test_counts_are_whole_blocks_within_all_bounds(page_size: int, conclusion: int) -> None:
    for tokens in range(page_size, 513, page_size):
        for entries in (0, 1, 7, 8, 16, 24, 31, 32, 64, 500, 4096):
            counts = table(conclusion).counts(entries, tokens, page_size)
            assert len(counts) == LAYERS * HEADS
            assert all(0 <= c <= tokens and c % page_size == 0 for c in counts)
            most = min(entries * len(counts), tokens * len(counts))
            assert most - page_size < sum(counts) <= most


def test_the_conclusion_comes_first_where_it_leaves_half_of_the_budget() -> None:
    assert table().counts(32, 512, 16) == [16, 32, 64, 32, 32, 16]
    assert table().counts(31, 512, 16) == table(0).counts(31, 512, 16) == [0, 16, 80, 48, 32, 0]
    assert table().counts(16, 512, 16) == [0, 16, 48, 16, 16, 0]
    assert min(table().counts(16, 512, 8)) == 0 and min(table().counts(32, 512, 8)) == 16


def test_a_full_head_gives_to_the_others_in_proportion() -> None:
    assert table(0).counts(32, 48, 16) == [0, 48, 48, 48, 48, 0]
    assert apportion([8.0, 1.0, 1.0, 0.0], 8, 4) == [4, 2, 2, 0]
    assert apportion([1.0, 0.0, 0.0], 5, 3) == [3, 1, 1]
    assert apportion([1.0, 2.0], 0, 3) == [0, 0]


def test_one_head_that_needs_all_gets_all_that_is_left() -> None:
    budgets = FoldBudgets(8, 2, (0.0,) * 7 + (16.0,) + (0.0,) * 8, 16)
    assert budgets.counts(32, 320, 16) == [16] * 7 + [16 + 256] + [16] * 8
    assert budgets.counts(16, 320, 16) == [0] * 7 + [256] + [0] * 8
    full = budgets.counts(32, 192, 16)  # what the full head cannot take goes to the others
    assert full[7] == 192 and sum(full) == 32 * 16 and set(full[:7] + full[8:]) == {16, 32}


def test_a_blend_is_of_mean_one_and_keeps_a_little_of_what_is_not_needed() -> None:
    assert blend([[0.0, 0.0], [0.08, 0.0]], [[6.0, 2.0], [0.0, 8.0]], 0.25) == [[0.375, 0.125], [3.0, 0.5]]
    assert blend([[0.0, 0.0]], [[1.0, 3.0]], 0.05) == blend([[2.0, 6.0]], [[0.0, 0.0]], 0.05) == [[0.5, 1.5]]
    assert blend([[1.0, 3.0]], [[9.0, 1.0]], 0.0) == [[0.5, 1.5]]


def test_everything_fits_when_everything_is_asked_for() -> None:
    assert table().counts(64, 64, 16) == table(0).counts(900, 64, 16) == [64] * 6
    assert table().counts(32, 15, 16) == [0] * 6
    assert table().counts(0, 512, 16) == [0] * 6


def test_apportion_is_the_largest_remainder() -> None:
    rng = Random(0)
    for _ in range(200):
        weights = [rng.random() for _ in range(7)]
        blocks = rng.randrange(40)
        given = apportion(weights, blocks, 99)
        exact = [blocks * w / sum(weights) for w in weights]
        assert sum(given) == blocks
        assert all(abs(g - e) < 1 for g, e in zip(given, exact, strict=True))
        up = [e - int(e) for g, e in zip(given, exact, strict=True) if g > e]
        down = [e - int(e) for g, e in zip(given, exact, strict=True) if g < e]
        assert min(up, default=1.0) >= max(down, default=0.0)


def test_without_a_table_all_heads_get_the_same() -> None:
    budgets = FoldBudgets.load(None, LAYERS, HEADS)
    assert not budgets.calibrated and table().calibrated
    assert budgets.counts(20, 512, 16) == [20] * 6
    assert budgets.counts(20, 16, 16) == [16] * 6
    assert budgets.counts(0, 16, 16) == [0] * 6


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fold_budgets.json"
    origin = {"model": "tiny", "calibrated_on": "two texts"}
    weights = [[0.0, 1.0], [6.0, 3.0], [2.0, 0.0]]
    write(path, weights, 16, [[0, 1], [0, 0], [2, 0]], origin)
    massive = replace(table(), mass=(0, 1, 0, 0, 2, 0))
    assert FoldBudgets.load(path, LAYERS, HEADS) == massive
    assert massive.options("conclusion_attention") == {"mass": massive.mass} and massive.options("snap") == {}
    write(path, weights, 16, [], origin)
    assert FoldBudgets.load(path, LAYERS, HEADS) == table() and table().options("conclusion_attention") == {}
    found = json.loads(path.read_text())
    assert found["model"] == "tiny" and found["weights"][1] == [3.0, 1.5]


def test_a_table_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fold_budgets.json"
    write(path, [[1.0, 1.0]] * 4, 16, [], {})
    for shape in ((3, 2), (4, 1), (2, 4)):
        with pytest.raises(ParameterError, match=r"fold_budgets: .* is for 4 layers of 2 KV heads"):
            FoldBudgets.load(path, *shape)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"weights": [], "conclusion": 16}',
        '{"weights": [1.0, 2.0], "conclusion": 16}',
        '{"weights": [[1.0, -2.0]], "conclusion": 16}',
        '{"weights": [[0.0, 0.0]], "conclusion": 16}',
        '{"weights": [[1.0, NaN]], "conclusion": 16}',
        '{"weights": [[1.0, true]], "conclusion": 16}',
        '{"weights": [[1.0, 2.0]], "conclusion": -1}',
        '{"weights": [[1.0, 2.0]]}',
        '{"weights": [[1.0, 2.0]], "conclusion": 16, "mass": [[1]]}',
        '{"weights": [[1.0, 2.0]], "conclusion": 16, "mass": [[0, 1], [0, 1]]}',
        '{"weights": [[1.0, 2.0]], "conclusion": 16, "mass": [[0, -1]]}',
        '{"weights": [[1.0, 2.0]], "conclusion": 16, "mass": [[0, 1.0]]}',
        '{"weights": [[1.0, 2.0]], "conclusion": 16, "mass": 1}',
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fold_budgets.json"
    path.write_text(text)
    with pytest.raises(ParameterError, match="fold_budgets"):
        FoldBudgets.load(path, 1, 2)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"cannot read none\.json"):
        FoldBudgets.load(tmp_path / "none.json", 1, 2)


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "fold_budgets.json"
    with pytest.raises(ParameterError, match="not all 0"):
        write(path, [[0.0]], 16, [], {})
    assert not path.exists()


def test_budgets_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import thinkfold.fold.budgets"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("weights", [(), (0.2, 1.9, 1.4, 0.5)])
def test_fewer_bits_keep_more_entries_in_the_same_bytes(weights: tuple[float, ...]) -> None:
    """13 blocks in the place of a page's 4: as many as fit in what was asked for, all of them full."""
    budgets = FoldBudgets(2, 2, weights, page_blocks=13)
    for entries in (1, 8, 20, 40):
        counts = budgets.counts(entries, 64, 8)
        assert all(count % 8 == 0 for count in counts)
        assert sum(counts) // 8 == min(entries * 13 // 8, 4 * 64 // 8)
    assert budgets.counts(64, 64, 8) == [64] * 4 and budgets.counts(0, 64, 8) == [0] * 4
    assert len(set(FoldBudgets(2, 2, page_blocks=13).counts(16, 64, 8))) == 2, "as equal as whole blocks are"
