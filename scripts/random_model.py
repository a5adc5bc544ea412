"""Write a small Qwen3 of random weights with a long context: `python scripts/random_model.py random-36k`.

For speed alone: outputs of 32k tokens, longer than Pebble was trained for, on a machine of two cores. The tokenizer is
Pebble's. No control token is ever the likeliest, so that a greedy output neither ends nor closes its thinking.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from thinkfold.pebble import pebble_path

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["full_attention"] * 2,
    "initializer_range": 0.2,
    "dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--context", type=int, default=36_864, help="tokens of a sequence")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.folder, args.context, args.seed)
    print(f"{args.folder}: {args.context} tokens")


def write(folder: Path, context: int, seed: int) -> None:
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(pebble_path(), **SHAPE, max_position_embeddings=context)
    model = AutoModelForCausalLM.from_config(config)
    tokenizer = json.loads((pebble_path() / "tokenizer.json").read_text())
    control = [added["id"] for added in tokenizer["added_tokens"]]
    with torch.no_grad():
        model.get_input_embeddings().weight[control] = 0.0  # tied: their logits are 0, the largest of others is more
    model.save_pretrained(folder)
    for file in pebble_path().glob("tokenizer*.json"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    main()
