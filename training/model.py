"""Qwen3 in plain PyTorch over packed texts; parameter names are those of `Qwen3ForCausalLM`."""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that a Qwen3 config names."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    longest: int

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        """From a config.json."""
        config = json.loads((folder / "config.json").read_text())
        return cls(
            config["vocab_size"],
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["rope_theta"],
            config["rms_norm_eps"],
            config["max_position_embeddings"],
        )


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Causal attention inside each text; q [tokens, heads, dim], k and v [tokens, kv_heads, dim]."""
    if not q.is_cuda:
        return _attend_each(q, k, v, bounds)
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, object] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


def _attend_each(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    parts = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        one = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm in fp32, back in x's dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain.to(x.dtype) * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; x [tokens, heads, dim], cos and sin [tokens, dim]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class Gain(nn.Module):
    """A norm's weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """Projections and head norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = Gain(shape.head_dim)
        self.k_norm = Gain(shape.head_dim)


class FeedForward(nn.Module):
    """SwiGLU weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)


class Layer(nn.Module):
    """One layer's weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Gain(shape.hidden)
        self.post_attention_layernorm = Gain(shape.hidden)

    def before_weights(self) -> list[Tensor]:
        """What `before` takes."""
        a = self.self_attn
        return [
            self.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight,
            a.q_norm.weight, a.k_norm.weight,
        ]  # fmt: skip

    def after_weights(self) -> list[Tensor]:
        """What `after` takes."""
        m = self.mlp
        return [
            self.self_attn.o_proj.weight, self.post_attention_layernorm.weight,
            m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight,
        ]  # fmt: skip


# A layer's two halves are pure functions of tensors, so that one compiled graph serves all layers
# and attention between them stays eager.


def before(x: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor], shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with positions."""
    gain, wq, wk, wv, q_gain, k_gain = weights
    joint = F.linear(norm(x, gain, shape.eps), torch.cat((wq, wk, wv)).to(x.dtype))
    joint = joint.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    q, k, v = joint.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    q = rotate(norm(q, q_gain, shape.eps), cos, sin)
    k = rotate(norm(k, k_gain, shape.eps), cos, sin)
    return q.contiguous(), k.contiguous(), v.contiguous()


def after(x: Tensor, attended: Tensor, weights: list[Tensor], shape: Shape) -> Tensor:
    """Output projection and the feed forward."""
    wo, gain, w_gate, w_up, w_down = weights
    x = x + F.linear(attended.flatten(1), wo.to(x.dtype))
    y = norm(x, gain, shape.eps)
    gate, up = F.linear(y, torch.cat((w_gate, w_up)).to(x.dtype)).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w_down.to(x.dtype))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Gain(shape.hidden)


class Pebble(nn.Module):
    """The model; `compile_parts()` compiles its halves and the loss."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Decoder(shape)
        self._before, self._after, self._loss = before, after, _loss
        angles = torch.outer(
            torch.arange(shape.longest).float(),
            shape.theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim),
        )
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._start()

    def _start(self) -> None:
        depth = (2 * self.shape.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                last = "o_proj" in name or "down_proj" in name
                nn.init.normal_(weight, std=std * (depth if last else 1.0))

    def compile_parts(self) -> None:
        """Compile what is plain tensor work."""
        self._before = torch.compile(before, dynamic=False)
        self._after = torch.compile(after, dynamic=False)
        self._loss = torch.compile(_loss, dynamic=False)

    def hidden(self, ids: Tensor, positions: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Last hidden states of packed texts [tokens, hidden]."""
        x = F.embedding(ids, self.model.embed_tokens.weight).to(self.dtype)
        cos, sin = self.cos[positions].to(self.dtype), self.sin[positions].to(self.dtype)
        for layer in self.model.layers:
            q, k, v = self._before(x, cos, sin, layer.before_weights(), self.shape)
            x = self._after(x, attend(q, k, v, bounds, longest), layer.after_weights(), self.shape)
        return norm(x, self.model.norm.weight, self.shape.eps)

    def logits(self, ids: Tensor, positions: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Logits of packed texts [tokens, vocabulary]."""
        return F.linear(self.hidden(ids, positions, bounds, longest), self.model.embed_tokens.weight.to(self.dtype))

    def loss(self, ids: Tensor, labels: Tensor, positions: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """Mean loss of the learned tokens."""
        return self._loss(self.hidden(ids, positions, bounds, longest), self.model.embed_tokens.weight, labels)


def _loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total / (labels >= 0).sum().clamp(min=1)
