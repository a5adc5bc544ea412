"""A Qwen3 of two layers with random weights, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """In eval mode; `changes` are fields of its configuration."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    return Qwen3ForCausalLM(Qwen3Config(**fields | changes)).eval()
