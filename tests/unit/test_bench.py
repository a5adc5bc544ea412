"""`thinkfold bench` finds the checkout's scripts, and says so where there are none."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import pytest

from thinkfold.cli import bench, rows
from thinkfold.errors import ParameterError, ThinkfoldError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def test_a_script_gets_its_options_and_gives_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "one.py").write_text("def main(options): return len(options)\n")
    monkeypatch.setattr(rows, "checkout", lambda: tmp_path)
    args = parse("one", "--json", "--runs", "3")
    assert args.run(args) == 3
    args = parse("two")
    with pytest.raises(ParameterError, match="there are one"):
        args.run(args)


def test_without_a_checkout_it_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "checkout", lambda: None)
    args = parse("serve")
    with pytest.raises(ThinkfoldError, match="from a checkout"):
        args.run(args)


def test_every_script_of_the_checkout_is_documented() -> None:
    root = rows.checkout()
    assert root is not None
    text = (root / "benchmarks" / "README.md").read_text()
    assert all(f"`{name}.py`" in text for name in bench.scripts())


def test_lengths_of_the_spread_case_span_one_to_eight() -> None:
    serve = load("serve")
    lengths = serve.spread(32, 64, 512, seed=0)
    assert (min(lengths), max(lengths), len(lengths)) == (64, 512, 32)
    assert lengths == serve.spread(32, 64, 512, seed=0) != sorted(lengths)


def test_drift_changes_blanks_and_line_ends_only() -> None:
    prefix = load("prefix")
    variants = {prefix.drifted(prefix.SYSTEM, Random(seed)) for seed in range(20)}
    assert len(variants) == 20
    assert any("\r\n" in text for text in variants)
    assert {"\n".join(line.rstrip() for line in text.splitlines()) for text in variants} == {prefix.SYSTEM}


def load(name: str):
    return bench.load(bench.scripts()[name])
