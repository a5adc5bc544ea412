"""Tensor parallelism in one process: every further rank is a thread, joined with rank 0 by gloo over loopback."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from thinkfold.config import EngineConfig
from thinkfold.engine.build import build_core
from thinkfold.pebble import pebble_path
from thinkfold.runner import loader
from thinkfold.runner.ranks import follow
from thinkfold.runner.shard import Shard

_LOADING = threading.Lock()  # transformers loads one model at a time in a process
_load = loader.load


def _load_alone(*args: Any) -> loader.LoadedModel:
    with _LOADING:
        return _load(*args)


def start_thread(config: EngineConfig, shard: Shard, rendezvous: Path, line: Connection) -> threading.Thread:
    """A rank in a thread; `loader.load` must be `load_alone`."""
    thread = threading.Thread(target=follow, args=(config, shard, rendezvous, line), daemon=True)
    thread.start()
    return thread


load_alone = _load_alone
build_with_threads = partial(build_core, start=start_thread)


def checkpoint(folder: Path, model_type: str, **changes: Any) -> Path:
    """A model of two layers with random weights, Pebble's tokenizer and a budget table in which heads differ."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": AutoConfig.from_pretrained(pebble_path()).vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(model_type, **fields | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(pebble_path() / name, folder)
    heads = config.num_key_value_heads
    weights = [[0.2 + head for head in range(heads)], [2.0 * heads - head for head in range(heads)]]
    table = {"entries": 32, "conclusion": 16, "weights": weights, "mass": []}
    (folder / "fold_budgets.json").write_text(json.dumps(table))
    return folder
