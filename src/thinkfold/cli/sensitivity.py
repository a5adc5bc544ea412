"""How much a model's loss rises when one head alone forgets what a fold would take from it.

Nothing is retrained and nothing is generated: the model reads a text again, and the loss of each token is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from tqdm import tqdm
from transformers import AttentionInterface

from thinkfold.errors import UnsupportedError
from thinkfold.fold.planner import COMMIT_LAG
from thinkfold.fold.spans import Span

IMPLEMENTATION = "thinkfold_sight"
BLOCK = 512  # queries that attend, and tokens that are judged, at a time
NEVER = 2**62  # no position is so late


@dataclass(frozen=True, slots=True)
class Blind:
    """A head that loses keys: queries at `gone[k]` and later do not see key `k`."""

    layer: int
    head: int  # KV head
    gone: Tensor  # [tokens] int64


@dataclass(slots=True)
class Sight:
    """The attention of a model, causal and within the layer's window, in blocks of queries; one head may be blind."""

    blind: Blind | None = None

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
        tokens, group = query.shape[2], query.shape[1] // key.shape[1]
        window = getattr(module, "sliding_window", None)
        blind = self.blind if self.blind and self.blind.layer == module.layer_idx else None
        at = torch.arange(tokens, device=query.device)
        out = torch.empty_like(query)
        for start in range(0, tokens, BLOCK):
            stop = min(tokens, start + BLOCK)
            rows, columns = at[start:stop, None], at[:stop]
            seen = columns <= rows
            if window:
                seen = seen & (columns > rows - window)
            asked, keys, values = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
            out[:, :, start:stop] = scaled_dot_product_attention(
                asked, keys, values, attn_mask=seen, scale=scaling, enable_gqa=group > 1
            )
            if blind:
                heads, one = slice(blind.head * group, (blind.head + 1) * group), slice(blind.head, blind.head + 1)
                left = seen & (rows < blind.gone[:stop])
                out[:, heads, start:stop] = scaled_dot_product_attention(
                    asked[:, heads], keys[:, one], values[:, one], attn_mask=left, scale=scaling, enable_gqa=group > 1
                )
        return out.transpose(1, 2), None


class Said(nn.Module):
    """Stands in for a layer whose output is known."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The known output, whatever comes in."""
        return self._hidden


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Rise of the loss `[layers, kv_heads]` in nats a token, its standard error, and the tokens that were judged."""

    rise: Tensor
    error: Tensor
    tokens: int

    @property
    def needs(self) -> Tensor:
        """The rises, 0 where one is no larger than its own standard error: noise is no need."""
        return self.rise.masked_fill(self.rise <= self.error, 0.0)


def measure(model: Any, texts: Sequence[tuple[Sequence[int], Sequence[Span]]], conclusion: int) -> Sensitivity:
    """What each head's entries are worth over texts, each with the spans that the engine would fold of it.

    One head at a time sees only the `conclusion` of each span from the position on at which the engine would have
    folded it; all other heads see everything. Judged are the tokens behind a text's first fold. Layers below the
    head's own say what they said when nothing was hidden and are not computed again. Raises UnsupportedError.
    """
    reader = Reader(model)
    heads = int(model.config.num_key_value_heads)
    cells = [(layer, head) for layer in range(len(reader.layers)) for head in range(heads)]
    lost: list[list[Tensor]] = [[] for _ in cells]
    with tqdm(total=len(texts) * len(cells), unit="head", file=sys.stderr) as bar:
        for ids, spans in texts:
            first = min((span.due + COMMIT_LAG for span in spans), default=NEVER)
            if first < len(ids) - 1:
                gone = forgotten(len(ids), spans, conclusion).to(model.device)
                for found, rise in zip(lost, reader.rises(ids, first, gone, cells), strict=True):
                    found.append(rise)
                    bar.update()
    if not lost[0]:
        raise UnsupportedError("texts", "no token comes behind a fold")
    rises = torch.stack([torch.cat(found) for found in lost])
    shape, tokens = (len(reader.layers), heads), rises.shape[1]
    error = rises.std(1, correction=0) / tokens**0.5
    return Sensitivity(rises.mean(1).view(shape), error.view(shape), tokens)


def forgotten(tokens: int, spans: Sequence[Span], conclusion: int) -> Tensor:
    """The position from which on each of a text's keys is gone, `[tokens]`; NEVER for what no fold takes.

    Of each span the `conclusion` last tokens before each of its `ends` stay, as `fold.segments.Segments` means them.
    """
    gone = torch.full((tokens,), NEVER)
    for span in spans:
        taken = torch.full((span.tokens,), span.due + COMMIT_LAG)
        for end in span.ends:
            taken[max(0, end - conclusion) : end] = NEVER
        gone[span.start : span.end] = taken
    return gone


class Reader:
    """Reads texts with one head blind after another."""

    def __init__(self, model: Any) -> None:
        layers = getattr(model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise UnsupportedError("model", "its layers are not to be found: use --by attention")
        self.layers = layers
        self._model = model
        self._sight = Sight()
        AttentionInterface.register(IMPLEMENTATION, self._sight.attend)
        model.set_attn_implementation(IMPLEMENTATION)

    @torch.no_grad()
    def rises(self, ids: Sequence[int], first: int, gone: Tensor, cells: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield for each `(layer, KV head)` the rise of the loss of every token behind position `first`, fp64."""
        text = torch.tensor([list(ids)], device=self._model.device)
        said = self._run(text, [], None)
        full = self._losses(text, first, said[-1])
        for layer, head in cells:
            final = self._run(text, said[:layer], Blind(layer, head, gone))[-1]
            yield self._losses(text, first, final) - full

    def _run(self, text: Tensor, said: Sequence[Tensor], blind: Blind | None) -> list[Tensor]:
        """Outputs of the layers from the first that is not known on."""
        found: list[Tensor] = []
        known = [Said(hidden) for hidden in said]
        live = list(self.layers)[len(said) :]

        def keep(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            found.append(out)

        hooks = [layer.register_forward_hook(keep) for layer in live]
        self._sight.blind = blind
        try:
            self._with([*known, *live], text)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _losses(self, text: Tensor, first: int, final: Tensor) -> Tensor:
        """Nats of each token behind position `first`, where `final` is the last layer's output."""
        found, count = [], text.shape[1] - 1
        for start in range(first, count, BLOCK):
            at = torch.arange(start, min(count, start + BLOCK), device=text.device)
            logits = self._with([Said(final)] * len(self.layers), text, at).double()
            found.append(cross_entropy(logits, text[0, at + 1], reduction="none"))
        return torch.cat(found).cpu()

    def _with(self, layers: Sequence[nn.Module], text: Tensor, at: Tensor | None = None) -> Tensor:
        """Logits `[n, vocabulary]` of the tokens `at` (default: none but the last) as these layers make them."""
        self._model.base_model.layers = nn.ModuleList(layers)
        try:
            return self._model(text, use_cache=False, logits_to_keep=1 if at is None else at).logits[0]
        finally:
            self._model.base_model.layers = self.layers
