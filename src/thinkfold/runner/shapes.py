"""Models that are known by their published configuration alone: for plans, and for speed with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# The first is DeepSeek-R1-Distill-Qwen-7B, the second Qwen3-32B.
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "7b": {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
            "dtype": "bfloat16",
            "bos_token_id": 151646,
            "eos_token_id": 151643,
        },
        "32b": {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
            "dtype": "bfloat16",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
    }
)
