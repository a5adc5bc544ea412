"""Puts blocks in place of decoder layers of a loaded model, where a trial shows that they do the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from thinkfold.runner.cpu_block import Attend, DecoderBlock
from thinkfold.runner.cpu_layers import FusedRMSNorm, fused_norm

IMPLEMENTATION = "thinkfold-trial"  # the attention of a trial
NUM_TOKENS = 6
TOLERANCE = 1e-4  # of the largest value
OPTIONS = ("scaling", "sliding_window", "softcap", "s_aux")  # what `adapter.attend` asks of a layer
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
HEAD_NORMS = ("q_norm", "k_norm")


class _Seen(NamedTuple):
    """What reached the attention of a layer: queries, keys, values `[1, H, T, D]`, and options."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]


class _Call(NamedTuple):
    """What a layer did in the trial."""

    hidden: Tensor
    kwargs: dict[str, Any]
    output: Tensor
    seen: _Seen


@torch.inference_mode()
def fuse(model: PreTrainedModel) -> int:
    """Replace decoder layers of an fp32 `model` on a CPU by blocks; returns how many.

    Layers that are not of the usual form (Llama, Mistral, Qwen2, Qwen3) stay as they are.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    norms = {layer: found for layers in lists for layer in layers if (found := _norms(layer)) is not None}
    attend = AttentionInterface()[model.config._attn_implementation]
    calls = _trial(model, list(norms)) if norms else {}
    fused = 0
    for layers in lists:
        for index, layer in enumerate(layers):
            block = _block(layer, norms[layer], attend, calls[layer]) if layer in calls else None
            if block is not None:
                layers[index] = block
                fused += 1
    return fused


def _norms(layer: nn.Module) -> list[FusedRMSNorm] | None:
    """The norms of a layer that has the children of a Llama's or a Qwen3's, in sizes that fit; else None."""
    children = dict(layer.named_children())
    if children.keys() != LAYER:
        return None
    own, mlp = children["self_attn"], children["mlp"]
    names = [name for name in HEAD_NORMS if hasattr(own, name)]
    outer = [fused_norm(children[name]) for name in ("input_layernorm", "post_attention_layernorm")]
    heads = [fused_norm(getattr(own, name)) for name in names]
    found = [norm for norm in (*outer, *heads) if norm is not None]
    if len(found) < 2 + len(names) or not _sizes_fit(own, mlp):
        return None
    heads = found[2:]
    if heads and {(norm.eps, *norm.weight.shape) for norm in heads} != {(heads[0].eps, own.head_dim)}:
        return None
    return found


def _sizes_fit(own: Any, mlp: Any) -> bool:
    """Whether these are an attention and an MLP of plain linear layers, and all there is to them."""
    linears = {name: child for part in (own, mlp) for name, child in part.named_children() if type(child) is nn.Linear}
    others = {name for part in (own, mlp) for name, _ in part.named_children()} - linears.keys()
    if linears.keys() != LINEARS or not others <= {*HEAD_NORMS, "act_fn"} or not isinstance(own.head_dim, int):
        return False
    queries, keys, gate = (linear.out_features for linear in (own.q_proj, own.k_proj, mlp.gate_proj))
    return (
        queries % own.head_dim == keys % own.head_dim == 0
        and keys == own.v_proj.out_features
        and queries == own.o_proj.in_features
        and gate == mlp.up_proj.out_features == mlp.down_proj.in_features
    )


def _trial(model: PreTrainedModel, layers: list[nn.Module]) -> dict[nn.Module, _Call]:
    """Run the whole model on a few tokens and note what each of `layers` did."""
    calls: dict[nn.Module, _Call] = {}
    trial: list[_Seen] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if len(args) == len(trial) == 1 and isinstance(output, Tensor) and _is_plain(args[0], kwargs, trial[0]):
            calls[layer] = _Call(args[0], kwargs, output, trial[0])
        trial.clear()

    AttentionInterface.register(IMPLEMENTATION, _stand_in)
    before = str(model.config._attn_implementation)
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        tokens = torch.arange(NUM_TOKENS)[None]
        model(input_ids=tokens % model.config.vocab_size, position_ids=3 * tokens, use_cache=False, trial=trial)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    return calls


def _is_plain(hidden: Tensor, kwargs: dict[str, Any], seen: _Seen) -> bool:
    """One row of tokens, no mask, and cos and sin that reach over whole heads."""
    tables = kwargs.get("position_embeddings")
    shape = (1, NUM_TOKENS, seen.tensors[0].shape[-1])
    return (
        hidden.shape[:2] == shape[:2]
        and kwargs.get("attention_mask") is None
        and isinstance(tables, tuple)
        and [table.shape for table in tables] == [shape, shape]
    )


def _stand_in(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trial: list[_Seen],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in a trial: notes its arguments and mixes them in some way."""
    trial.append(_Seen((query, key, value), {name: kwargs[name] for name in OPTIONS if name in kwargs}))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    return (query + key - value).transpose(1, 2).contiguous(), None


def _block(layer: nn.Module, norms: list[FusedRMSNorm], attend: Attend, call: _Call) -> DecoderBlock | None:
    """A block in place of `layer` if it does what that did."""
    block = DecoderBlock(layer, norms, _stand_in, call.seen.options)
    trial: list[_Seen] = []
    output = block(call.hidden, **{**call.kwargs, "trial": trial})
    block.attend = attend
    mine, theirs = (*trial[0].tensors, output - call.hidden), (*call.seen.tensors, call.output - call.hidden)
    return block if all(_is_close(a, b) for a, b in zip(mine, theirs, strict=True)) else None


def _is_close(mine: Tensor, other: Tensor) -> bool:
    return mine.shape == other.shape and bool((mine - other).abs().max() <= TOLERANCE * other.abs().max())
