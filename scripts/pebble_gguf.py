"""Write Pebble as a GGUF file, so that llama.cpp can serve it: `python scripts/pebble_gguf.py pebble.gguf`.

Tensors and names are those of llama.cpp's own converter for Qwen3. Weights are written as they are stored
(bf16), or with `--float32` so that llama.cpp's products are not rounded to bf16; norms are fp32. `--model` is a
folder of another Qwen3 with Pebble's tokenizer (`scripts/random_model.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from thinkfold.pebble import pebble_path

PRE_TOKENIZER = "qwen2"  # llama.cpp's name of the pattern by which Pebble's tokenizer splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the GGUF file to write")
    parser.add_argument("--model", type=Path, default=pebble_path(), help="a folder (default: the embedded model)")
    parser.add_argument("--float32", action="store_true", help="weights as fp32")
    args = parser.parse_args()
    write(args.file, args.model, args.float32)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.1f} MB")


def write(file: Path, folder: Path, whole: bool) -> None:
    """Raises ValueError for a tensor that llama.cpp would not know."""
    config = AutoConfig.from_pretrained(folder).to_dict()
    writer = gguf.GGUFWriter(file, "qwen3")
    _write_facts(writer, config, whole)
    _write_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = names.get_name(name, try_suffixes=(".weight",))
        if own is None:
            raise ValueError(f"llama.cpp knows no tensor {name}")
        _write_tensor(writer, own, tensor, whole)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_facts(writer: gguf.GGUFWriter, config: dict[str, Any], whole: bool) -> None:
    writer.add_name("Pebble")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if whole else gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for text, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        # A server prints no control tokens, and the end of a segment is part of what has been thought.
        hidden = added["special"] and added["content"] != "<|segment|>"
        types[added["id"]] = gguf.TokenType.CONTROL if hidden else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def _write_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, whole: bool) -> None:
    if whole or tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main()
