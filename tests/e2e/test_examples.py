"""The examples run as they are written: some on random weights, where what they print is noise, some on Pebble."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DUMMY, Served, run_server

import thinkfold
from thinkfold.config import EngineConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
# Random weights never end by themselves: a short model keeps the replies short.
SHORT: dict[str, Any] = {**DUMMY, "max_model_len": 96}


@pytest.fixture(scope="module")
def short() -> Iterator[Served]:
    yield from run_server(EngineConfig(**SHORT))


@pytest.mark.parametrize("name", ["chat_stream", "budget", "vote", "early_stop"])
def test_client_examples(
    name: str, short: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, f"{short.url}/v1"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "thinking" in capsys.readouterr().out


def test_offline_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = thinkfold.LLM

    def dummy(model: str, **config: Any) -> Any:
        assert model == "pebble"
        return real(**{**SHORT, **config})

    monkeypatch.setattr(sys, "argv", ["offline"])
    monkeypatch.setattr(thinkfold, "LLM", dummy)
    runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")
    assert "then said" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("anthropic_messages", "", "boxed{12}"),
        ("folding", "/v1", "become 32 entries"),
        ("steps_from_outside", "/v1", "characters, then: "),
        ("search", "/v1", "tokens kept"),
    ],
)
def test_examples_on_the_trained_model(
    name: str, path: str, said: str, pebble: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, f"{pebble.url}{path}"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out


def test_a_verifier_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["best_of"])
    runpy.run_path(str(EXAMPLES / "best_of.py"), run_name="__main__")
    assert capsys.readouterr().out.count("scores") >= 2


def test_a_selector_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_selector.py"), run_name="__main__")
    lines = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    errors = {name: float(error) for name, error in lines}
    assert errors["ValueNorm (yours)"] < errors["streaming"] < errors["drop"]


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 11 and max(lengths.values()) < 40
