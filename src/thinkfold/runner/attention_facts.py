"""What a fold must know of a model's attention: its scale, its windows, and how positions turn a query."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # who folds by hand needs no transformers
    from thinkfold.runner.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """`scale` of the logits; `windowed` `[L]` says which layers forget what lies behind `window` tokens (0: none does).

    `inv_freq` turns queries to other positions; None where the model's rope is not the plain one.
    """

    scale: float
    windowed: Tensor
    inv_freq: Tensor | None
    window: int


def attention_facts(loaded: LoadedModel) -> AttentionFacts:
    """Read a loaded model's attention layers and rope."""
    config = loaded.model.config
    layers = [m for m in loaded.model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    scales = [scale for m in layers if isinstance(scale := getattr(m, "scaling", None), float)]
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        types = types * loaded.num_layers
    windowed = torch.tensor([kind == "sliding_attention" for kind in types], device=loaded.device)
    return AttentionFacts(
        scale=scales[0] if scales else loaded.head_dim**-0.5,
        windowed=windowed,
        inv_freq=_inv_freq(loaded.model),
        window=int(config.sliding_window) if "sliding_attention" in types else 0,
    )


def _inv_freq(model: nn.Module) -> Tensor | None:
    """The frequencies of a rope that turns the two halves of every layer's queries alike, else None."""
    inner = getattr(model, "base_model", model)
    found = getattr(getattr(inner, "rotary_emb", None), "inv_freq", None)
    turn = getattr(sys.modules[type(inner).__module__], "rotate_half", None)
    if not isinstance(found, Tensor) or turn is None or getattr(inner.config, "no_rope_layers", None):
        return None
    halves = torch.arange(4.0)
    return found if torch.equal(turn(halves), torch.tensor([-2.0, -3.0, 0.0, 1.0])) else None
