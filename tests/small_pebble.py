"""Pebble's tokenizer in front of two narrow layers: where weights are random, a step may be small, too."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from thinkfold.pebble import pebble_path
from thinkfold.runner.storage import page_bytes

NUM_LAYERS = 2
PAGE_BYTES = page_bytes(NUM_LAYERS, 2, 16, 64, torch.float32, bias=True)
BUDGETS = {"entries": 32, "conclusion": 16, "weights": [[0.5, 0.1], [0.1, 9.0]], "mass": [[1, 0], [0, 1]]}


def small_pebble() -> str:
    """A folder for `load_format="dummy"`: heads, vocabulary and template are Pebble's. It goes with the process."""
    return _folder().name


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="small-pebble-")
    here, pebble = Path(folder.name), pebble_path()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(pebble / name, here)
    config = json.loads((pebble / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "hidden_size": 128, "intermediate_size": 256}
    (here / "config.json").write_text(json.dumps(config))
    (here / "fold_budgets.json").write_text(json.dumps(BUDGETS))
    return folder
