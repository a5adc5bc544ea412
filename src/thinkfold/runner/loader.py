"""Loads a model through transformers and refuses by name what our attention cannot honour.

It knows nothing of KV pages or batches.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from thinkfold.config import EMBEDDED_MODEL, EngineConfig
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.runner import adapter, cpu_fusion, cpu_layers, tensor_parallel
from thinkfold.runner.shapes import SHAPES
from thinkfold.runner.shard import WHOLE, Shard

WAY_OUT = "serve it with another engine, such as vLLM or SGLang, and put thinkfold over that (--engine openai)"
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or one rank's shard of it, on its device with what the runner must know of it.

    `num_heads` and `num_kv_heads` are the shard's own. `max_position` is the longest context its rope was made for.
    `tokenizer` is None for a folder without tokenizer files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    shard: Shard = WHOLE


def load(config: EngineConfig, shard: Shard = WHOLE) -> LoadedModel:
    """Load `config.model`, or a shard of it: a folder, a hub id, or `pebble` from the package.

    dtype `auto` is the checkpoint's on a GPU and fp32 on a CPU. Raises ParameterError where
    nothing can be loaded and UnsupportedError for a model that must be refused (design rule 1).
    """
    device = pick_device(config.device, shard)
    source = _source(config.model)
    hf_config = read_config(config.model)
    check_supported(hf_config)
    dtype = _dtype(config.dtype, hf_config, device)
    model = _weights(source, config, hf_config, dtype, device, shard)
    if device.type == "cpu" and dtype == torch.float32:
        cpu_fusion.fuse(model)
        cpu_layers.speed_up(model)
    return LoadedModel(
        model=model,
        tokenizer=_tokenizer(source),
        model_type=hf_config.model_type,
        max_position=_max_position(hf_config),
        eos_token_ids=_eos_token_ids(source, hf_config),
        dtype=dtype,
        device=device,
        shard=shard,
        **_layout(hf_config, shard),
    )


def outline(config: EngineConfig) -> LoadedModel:
    """What `load` would load on a GPU, the first of its ranks, with tensors on the meta device: shapes without memory.

    No weights are read. `config.model` may be one of SHAPES, too. Raises as `load` does.
    """
    hf_config, meta = _outlined(config.model), torch.device("meta")
    check_supported(hf_config)
    dtype, shard = _dtype(config.dtype, hf_config, meta), Shard(0, config.tensor_parallel_size)
    with meta:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    _check_class(model)
    if not shard.alone:
        tensor_parallel.check_heads(hf_config, shard.size)
        tensor_parallel.split(model, shard)
    return LoadedModel(
        model=model,
        tokenizer=None,
        model_type=hf_config.model_type,
        max_position=_max_position(hf_config),
        eos_token_ids=(),
        dtype=dtype,
        device=meta,
        shard=shard,
        **_layout(hf_config, shard),
    )


def load_tokenizer(config: EngineConfig) -> tuple[PreTrainedTokenizerBase, str, tuple[int, ...]]:
    """The tokenizer of `config.model`, its model type and its end token ids; no weights.

    Raises ParameterError where nothing can be loaded.
    """
    source = _source(config.model)
    try:
        hf_config = AutoConfig.from_pretrained(source)
        tokenizer = _tokenizer(source)
    except (OSError, ValueError, KeyError) as error:
        raise ParameterError("model", f"cannot load {config.model!r}: {_first_line(error)}") from error
    if tokenizer is None:
        raise ParameterError("model", f"{config.model!r} holds no tokenizer")
    return tokenizer, hf_config.model_type, _eos_token_ids(source, hf_config)


def pick_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """The device called `name`; `auto` is the first GPU, else the CPU. Raises ParameterError.

    Ranks have as many GPUs in a row, from that one on.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError("device", f"unknown device {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError("device", f"must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device", "cuda is asked for, but torch sees no GPU")
    if shard.alone or device.type == "cpu":
        return device
    first, found = device.index or 0, torch.cuda.device_count()
    if first + shard.size > found:
        raise ParameterError(
            tensor_parallel.FIELD, f"{shard.size} GPUs from {first} on are asked for, torch sees {found}"
        )
    return torch.device("cuda", first + shard.rank)


def pick_attention(name: str, device: torch.device) -> str:
    """The body of the attention op; `auto` is triton on a GPU, else reference. Raises UnsupportedError."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "reference"
    if name == "triton" and device.type != "cuda":
        raise UnsupportedError("attention_backend", f"triton needs a GPU, and the device is {device.type}")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise UnsupportedError("attention_backend", "triton is not installed; reference needs none, and is slow")
    return name


def check_supported(hf_config: PretrainedConfig) -> None:
    """Raise UnsupportedError for what shows in a config: MLA, softcap, sinks, rope of the batch."""
    reason = None
    if getattr(hf_config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder"
    elif getattr(hf_config, "kv_lora_rank", None):
        reason = "it uses multi-head latent attention (MLA)"
    elif getattr(hf_config, "attn_logit_softcapping", None):
        reason = "it caps attention logits (softcap)"
    elif getattr(hf_config, "num_kv_shared_layers", 0):
        reason = "its layers share KV"
    elif getattr(hf_config, "attention_chunk_size", None):
        reason = "it uses chunked attention"
    elif types := _rope_types(hf_config) & {"dynamic", "longrope"}:
        reason = f"its rope ({types.pop()}) depends on the batch"
    elif other := set(getattr(hf_config, "layer_types", None) or ()) - LAYER_TYPES:
        reason = f"it has layers of type {', '.join(sorted(other))}"
    if reason:
        raise _refusal(hf_config.model_type, reason)


def _check_class(model: PreTrainedModel) -> None:
    if not getattr(model, "_supports_attention_backend", False):
        raise _refusal(model.config.model_type, "its attention bypasses the attention interface")
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        raise _refusal(model.config.model_type, "it uses attention sinks")


def _refusal(model_type: str, reason: str) -> UnsupportedError:
    return UnsupportedError("model", f"{model_type} is not supported: {reason}; {WAY_OUT}")


def _rope_types(hf_config: PretrainedConfig) -> set[str]:
    parameters: Any = getattr(hf_config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {p.get("rope_type", "default") for p in (nested or [parameters])}


def _source(name: str) -> str:
    if name == EMBEDDED_MODEL:
        return str(importlib.resources.files("thinkfold.pebble") / "model")
    return name


def read_config(name: str) -> PretrainedConfig:
    """The configuration of a model alone. Raises ParameterError."""
    try:
        return AutoConfig.from_pretrained(_source(name))
    except (OSError, ValueError, KeyError) as error:
        raise ParameterError("model", f"cannot load {name!r}: {_first_line(error)}") from error


def _outlined(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(**SHAPES[name]) if name in SHAPES else read_config(name)


def _dtype(name: str, hf_config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    dtype = getattr(hf_config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _weights(
    source: str,
    config: EngineConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> PreTrainedModel:
    adapter.register()
    body = pick_attention(config.attention_backend, device)
    implementation = adapter.IMPLEMENTATIONS[body + ("_int4" if config.fold_storage == "int4" else "")]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": implementation}
    try:
        if config.load_format == "dummy":
            torch.manual_seed(config.seed or 0)
            with device if shard.alone else torch.device("cpu"):  # one rank's device need not hold it whole
                model = AutoModelForCausalLM.from_config(hf_config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, config=hf_config, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ParameterError("model", f"cannot load {config.model!r}: {_first_line(error)}") from error
    _check_class(model)
    if not shard.alone:
        tensor_parallel.check_heads(hf_config, shard.size)
        tensor_parallel.split(model, shard)  # weights of a file are read only now, and only the shard's
    model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    return model


def _layout(hf_config: PretrainedConfig, shard: Shard) -> dict[str, int]:
    heads, kv_heads = tensor_parallel.heads_of(hf_config)
    return {
        "num_layers": hf_config.num_hidden_layers,
        "num_heads": heads // shard.size,
        "num_kv_heads": max(1, kv_heads // shard.size),
        "head_dim": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "vocab_size": hf_config.vocab_size,
    }


def _max_position(hf_config: PretrainedConfig) -> int:
    return hf_config.max_position_embeddings


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(source)


def _eos_token_ids(source: str, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """End ids of the generation config, else of the model config, sorted."""
    folder = Path(source)
    ids: int | list[int] | None = None
    if not folder.is_dir() or (folder / "generation_config.json").exists():
        try:
            ids = GenerationConfig.from_pretrained(source).eos_token_id
        except OSError:  # a hub model without a generation config
            ids = None
    ids = hf_config.eos_token_id if ids is None else ids
    return tuple(sorted({ids} if isinstance(ids, int) else set(ids or ())))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
