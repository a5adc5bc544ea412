"""Splits a loaded model over ranks by the plan that it brings along, `tp_plan`, in plain layers.

Each rank keeps its part of the products; attention between them sees its own heads only. Of
transformers only the plan is used, which says what becomes of which layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.runner.collectives import beside, sum_
from thinkfold.runner.shard import Shard

FIELD = "tensor_parallel_size"
KV_PROJECTIONS = ("k_proj", "v_proj")


class SummedLinear(nn.Module):
    """A linear layer whose inputs are split: the sum of each rank's product. With `split`, inputs come whole."""

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, shard: Shard, *, split: bool = False) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._shard = shard
        self._split = split

    def forward(self, rows: Tensor) -> Tensor:
        """`[…, own inputs]`, or all of them, to `[…, outputs]`."""
        if self._split:
            rows = rows.chunk(self._shard.size, -1)[self._shard.rank]
        output = self.linear(rows)
        sum_(output, self._shard.group)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """A linear layer whose outputs are split, side by side again; the first `width` of them are real."""

    def __init__(self, linear: nn.Linear, width: int, shard: Shard) -> None:
        super().__init__()
        self.linear = linear
        self._width = width
        self._shard = shard

    def forward(self, rows: Tensor) -> Tensor:
        """`[…, inputs]` to `[…, width]`."""
        return beside(self.linear(rows), self._shard.group, self._shard.size)[..., : self._width]


class SummedEmbedding(nn.Module):
    """A table of embeddings of which each rank holds some lines: what the others do not have is 0 there."""

    def __init__(self, weight: nn.Parameter, shard: Shard) -> None:
        super().__init__()
        self.weight = weight
        self._first = shard.rank * len(weight)
        self._group = shard.group

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[…]` to `[…, size]`."""
        own = token_ids - self._first
        absent = (own < 0) | (own >= len(self.weight))
        found = functional.embedding(own.masked_fill(absent, 0), self.weight)
        found = found.masked_fill(absent.unsqueeze(-1), 0.0)
        sum_(found, self._group)
        return found


class SummedExperts(nn.Module):
    """Experts of which each rank holds a part of every one: outputs are summed."""

    def __init__(self, experts: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.experts = experts
        self._group = shard.group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As that of `experts`."""
        output = self.experts(*args, **kwargs)
        sum_(output, self._group)
        return output


def check_heads(config: PretrainedConfig, size: int) -> None:
    """Raise ParameterError unless attention heads can be dealt out to `size` ranks."""
    heads, kv_heads = heads_of(config)
    if heads % size:
        raise ParameterError(FIELD, f"{size} does not divide the {heads} attention heads of {config.model_type}")
    if kv_heads % size and size % kv_heads:
        raise ParameterError(
            FIELD,
            f"{size} neither divides the {kv_heads} KV heads of {config.model_type} nor is a multiple of them",
        )


def heads_of(config: PretrainedConfig) -> tuple[int, int]:
    """Attention heads and KV heads of a layer."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def split(model: PreTrainedModel, shard: Shard) -> None:
    """Replace the layers that the model's plan names by this rank's part of them.

    Where there are fewer KV heads than ranks, several ranks hold the same one. Raises UnsupportedError for a model
    without a plan, or with one that asks for what is not known here or leaves attention whole, and ParameterError
    where parts would be unequal.
    """
    plan = _plan(model)
    kv_heads = heads_of(model.config)[1]
    copies = max(1, shard.size // kv_heads)
    parts = _Parts(shard)
    modules = dict(model.named_modules())
    for name, parameter, style in _named(dict(model.named_parameters(remove_duplicate=False)), plan):
        owner, _, child = name.rpartition(".")
        modules[owner].register_parameter(child, parts.of_experts(parameter, name, style))
    for name, module, style in _named(modules, plan):
        kept = copies if name.rpartition(".")[2] in KV_PROJECTIONS else 1
        new = _STYLES[style](parts, module, name, kept)
        if new is not module:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, new)


class _Parts:
    """Cuts weights. What is tied stays tied: a weight that is cut twice in the same way is one."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._cut: dict[tuple[int, int], tuple[Tensor, nn.Parameter]] = {}

    def of(self, weight: Tensor, dim: int, name: str, copies: int = 1) -> nn.Parameter:
        """This rank's equal part along a dimension, of which each is given to `copies` ranks in a row."""
        size, width = self.shard.size // copies, weight.shape[dim]
        if width % size:
            raise ParameterError(FIELD, f"{self.shard.size} does not divide the {width} of {name}")
        part = weight.detach().narrow(dim, self.shard.rank // copies * (width // size), width // size)
        return _parameter(part)

    def padded(self, weight: Tensor) -> nn.Parameter:
        """This rank's lines; the last rank's are filled up with zeros, so that all have as many."""
        known = self._cut.get((id(weight), 0))
        if known is None:
            count = -(-len(weight) // self.shard.size)
            part = weight.detach()[self.shard.rank * count :][:count]
            part = functional.pad(part, (0, 0) * (part.dim() - 1) + (0, count - len(part)))
            known = self._cut[id(weight), 0] = (weight, _parameter(part))  # held: a freed one gives its id away
        return known[1]

    def of_experts(self, weight: Tensor, name: str, style: str) -> nn.Parameter:
        """A part of each expert in `[experts, outputs, inputs]`."""
        if style == "packed_colwise":  # two products side by side
            return _parameter(torch.cat([self.of(half, -2, name) for half in weight.chunk(2, -2)], -2))
        return self.of(weight, -1 if style == "rowwise" else -2, name)


def _parameter(part: Tensor) -> nn.Parameter:
    """A copy: a view would keep the whole weight."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _columns(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    linear = _plain(module, name)
    bias = None if linear.bias is None else parts.of(linear.bias, 0, name, copies)
    return _linear(parts.of(linear.weight, 0, name, copies), bias)


def _gathered(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    linear = _plain(module, name)
    bias = None if linear.bias is None else parts.padded(linear.bias)
    return GatheredLinear(_linear(parts.padded(linear.weight), bias), linear.out_features, parts.shard)


def _rows(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    linear = _plain(module, name)
    return SummedLinear(_linear(parts.of(linear.weight, 1, name), None), linear.bias, parts.shard)


def _rows_of_whole(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    linear = _plain(module, name)
    return SummedLinear(_linear(parts.of(linear.weight, 1, name), None), linear.bias, parts.shard, split=True)


def _lines(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    if type(module) is not nn.Embedding:
        raise UnsupportedError(FIELD, f"{name} is a {type(module).__name__}, which cannot be split")
    return SummedEmbedding(parts.padded(module.weight), parts.shard)


def _experts(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    return SummedExperts(module, parts.shard)


def _whole(parts: _Parts, module: nn.Module, name: str, copies: int) -> nn.Module:
    return module


_STYLES: Mapping[str, Callable[[_Parts, nn.Module, str, int], nn.Module]] = MappingProxyType(
    {
        "colwise": _columns,
        "colwise_gather_output": _gathered,
        "colwise_rep": _gathered,
        "rowwise": _rows,
        "rowwise_split_input": _rows_of_whole,
        "embedding_rowwise": _lines,
        "moe_tp_experts": _experts,
        "replicated_with_grad_allreduce": _whole,
        "replicate": _whole,
    }
)
_OF_PARAMETERS = ("packed_colwise", "colwise", "rowwise")


def _plan(model: PreTrainedModel) -> dict[str, str]:
    plan, kind = dict(model.tp_plan or {}), model.config.model_type
    if not plan:
        raise UnsupportedError(FIELD, f"transformers has no plan to split {kind}")
    unknown = set(plan.values()) - _STYLES.keys() - set(_OF_PARAMETERS)
    if unknown:
        raise UnsupportedError(FIELD, f"the plan of {kind} asks for {', '.join(sorted(unknown))}")
    keys = [style for name, style in plan.items() if name.rpartition(".")[2] in KV_PROJECTIONS]
    if not keys or set(keys) != {"colwise"}:
        raise UnsupportedError(FIELD, f"the plan of {kind} leaves attention whole, and with it the KV of every rank")
    return plan


def _named(found: Mapping[str, Any], plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """What the plan names, with what is to become of it; inner ones first, so that outer ones take them in."""
    for name in sorted(found, key=lambda name: -name.count(".")):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield name, found[name], style


def _plain(module: nn.Module, name: str) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise UnsupportedError(FIELD, f"{name} is a {type(module).__name__}, which cannot be split")
    return module


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    return linear
