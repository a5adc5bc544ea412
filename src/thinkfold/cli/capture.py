"""Runs a transformers model with an attention of our own that records what passes, for calibration and trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from thinkfold.fold.record import Record
from thinkfold.fold.segments import Entries, raw_entries

IMPLEMENTATION = "thinkfold_capture"


@dataclass(slots=True)
class Tape:
    """The attention of a model: causal over the tokens at hand and over `memory`, one item a layer, where it is set.

    What passes is kept until `take`. A list in `outputs` gets those of all layers, which keep their gradients.
    """

    memory: Sequence[Entries] | None = None
    outputs: list[Tensor] | None = None  # [1, tokens, heads, dim] each
    _queries: list[Tensor] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)
    _scale: float = 1.0

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
        self._scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._queries.append(query[0])
        self._keys.append(key[0])
        self._values.append(value[0])
        group = query.shape[1] // key.shape[1]
        window = getattr(module, "sliding_window", None)
        if self.memory is None and not window:
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=group > 1
            )
            return self._seen(out.transpose(1, 2)), None
        count = query.shape[2]
        bias = torch.full((count, count), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
        if window:
            bias = bias + torch.full_like(bias, -torch.inf).tril(-window)
        bias = bias.expand(query.shape[1], -1, -1)
        if self.memory is not None:
            kept = self.memory[module.layer_idx]
            before = kept.bias.repeat_interleave(group, dim=0).unsqueeze(1).expand(-1, count, -1)
            bias = torch.cat((before, bias), dim=-1)
            key = torch.cat((kept.keys, key[0]), dim=1)[None]
            value = torch.cat((kept.values, value[0]), dim=1)[None]
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=bias[None], scale=self._scale, enable_gqa=group > 1
        )
        return self._seen(out.transpose(1, 2)), None

    def _seen(self, out: Tensor) -> Tensor:
        if self.outputs is not None:
            out.retain_grad() if out.requires_grad else out.requires_grad_()
            self.outputs.append(out)
        return out

    def take(self) -> Record:
        """What has passed since the last call, in fp32."""
        queries, keys, values = (torch.stack(part).float() for part in (self._queries, self._keys, self._values))
        record = Record(queries.unflatten(1, (keys.shape[1], -1)), keys, values, self._scale)
        for part in (self._queries, self._keys, self._values):
            part.clear()
        return record


def use_tape(model: Any) -> Tape:
    """Make the model attend through a new tape."""
    tape = Tape()
    AttentionInterface.register(IMPLEMENTATION, tape.attend)
    model.set_attn_implementation(IMPLEMENTATION)
    return tape


@torch.no_grad()
def read(model: Any, tape: Tape, ids: Sequence[int]) -> Record:
    """Run the model once over a text, without its language head, and record all layers."""
    tape.memory = None
    model.base_model(torch.tensor([list(ids)], device=model.device), use_cache=False)
    return tape.take()


def output_gradients(model: Any, tape: Tape, record: Record, ids: Sequence[int], last: int) -> Tensor:
    """Mean squared gradient of the loss of the `last` tokens of a text by the attention output of each query head.

    `record` holds all of the text; returns `[L, H, group]`, of the squared norm over head_dim, a token's on average.
    """
    first = len(ids) - last
    past = (record.keys[:, :, :first].to(model.dtype), record.values[:, :, :first].to(model.dtype))
    tape.memory = [raw_entries(keys, values) for keys, values in zip(*past, strict=True)]
    tape.outputs = outputs = []
    tokens = torch.tensor([list(ids[first:])], device=model.device)
    with torch.enable_grad():
        positions = torch.arange(first, len(ids), device=model.device)[None]
        logits = model(tokens, position_ids=positions, use_cache=False).logits[0, :-1].float()
        cross_entropy(logits, tokens[0, 1:], reduction="sum").backward()
    tape.outputs = tape.memory = None
    tape.take()
    squares = torch.stack([out.grad[0].float().square().sum(-1).mean(0) for out in outputs if out.grad is not None])
    return squares.unflatten(1, (record.keys.shape[1], -1))
