"""The model of random weights for long outputs: its length, what it can never say, and its GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import random_model


def test_it_is_long_and_says_no_control_token(tmp_path: Path) -> None:
    random_model.write(tmp_path, context=36_864, seed=0)
    config, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert config.max_position_embeddings == 36_864 and config.tie_word_embeddings
    rows = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert not rows[list(tokenizer.added_tokens_decoder)].any()
    assert rows.any(dim=1).sum() == config.vocab_size - len(tokenizer.added_tokens_decoder)


def test_llama_cpp_gets_it_whole(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import pebble_gguf

    random_model.write(tmp_path / "model", context=2_048, seed=0)
    pebble_gguf.write(tmp_path / "model.gguf", tmp_path / "model", whole=True)
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    assert read.get_field("qwen3.context_length").contents() == 2_048
    assert {tensor.tensor_type for tensor in read.tensors} == {gguf.GGMLQuantizationType.F32}
