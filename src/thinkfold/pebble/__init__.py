"""Pebble, the small reference reasoner that ships with thinkfold: its files, tasks and suites."""

from pathlib import Path

from thinkfold.pebble.problem import Problem, extract_boxed
from thinkfold.pebble.suites import SUITES, problems
from thinkfold.pebble.tasks import score

__all__ = ["SUITES", "Problem", "extract_boxed", "pebble_path", "problems", "score"]


def pebble_path() -> Path:
    """The Hugging Face folder of Pebble: config, tokenizer, chat template and weights."""
    return Path(__file__).parent / "model"
