"""The model behind a remote server as the front sees it: its length from the server, its shape from local files."""

from __future__ import annotations

from transformers import PretrainedConfig

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote.dialect import Dialect
from thinkfold.engine.language import Language
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import ParameterError
from thinkfold.runner.loader import read_config

KV_BYTES = 2  # of a number, as most servers store it


def model_info(config: EngineConfig, language: Language, dialect: Dialect) -> ModelInfo:
    """Raises ParameterError for a max_model_len that the server does not reach, or where nobody knows it."""
    family = language.family
    whole = read_config(config.model)
    shape: PretrainedConfig = whole.get_text_config()
    enforced = family is not None and bool(family.force_ids)
    length = _length(config, dialect, getattr(shape, "max_position_embeddings", None))
    return ModelInfo(
        name=config.served_model_name or config.model,
        model_type=whole.model_type,
        max_model_len=length,
        vocab_size=max(shape.vocab_size, language.vocabulary.size),
        num_pages=0,
        page_size=1,
        page_bytes=entry_bytes(shape),
        kv_capacity=length,
        family=family.name if family else None,
        thinks=family is not None,
        budget_enforced=enforced,
        engine="openai",
        abilities=dialect.abilities(thinks=family is not None, enforced=enforced),
    )


def _length(config: EngineConfig, dialect: Dialect, positions: int | None) -> int:
    remote, asked = dialect.max_model_len, config.max_model_len
    if asked is not None:
        if remote is not None and asked > remote:
            raise ParameterError("max_model_len", f"must be at most {remote}, the remote engine's own, got {asked}")
        return asked
    known = [each for each in (remote, positions) if each is not None]
    if not known:
        raise ParameterError(
            "max_model_len", "neither the remote engine nor the model's configuration says it: give it"
        )
    return min(known)


def entry_bytes(shape: PretrainedConfig) -> int:
    """Bytes of one token's KV in all layers; 0 where the configuration does not say."""
    heads = getattr(shape, "num_attention_heads", None)
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    width = getattr(shape, "head_dim", None) or (shape.hidden_size // heads if heads else None)
    if not kv_heads or not width or getattr(shape, "kv_lora_rank", None):
        return 0
    return 2 * shape.num_hidden_layers * kv_heads * width * KV_BYTES
