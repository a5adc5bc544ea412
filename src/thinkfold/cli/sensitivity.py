"""Which heads need what a fold takes from them: how much a model's loss falls when one of them gets it back.

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
from thinkfold.fold.segments import Entries
from thinkfold.fold.spans import Span

IMPLEMENTATION = "thinkfold_sight"
BLOCK = 512  # queries that attend, and tokens that are judged, at a time
NEVER = 2**62  # no position is so late
ROUNDS = 12  # heads that get something back, at most
LEAST = 1e-4  # nats a token that are worth a place in the table
ENOUGH = 0.5  # of what all of its tokens are worth: then a pooled entry does for a head

Cell = tuple[int, int]  # layer, KV head


@dataclass(frozen=True, slots=True)
class Text:
    """A text as token ids, and the spans of it that the engine would fold.

    `pooled` are entries `[layers, kv_heads, spans, dim]` that could stand for what each head loses of each span.
    """

    ids: Sequence[int]
    spans: Sequence[Span]
    pooled: Entries


@dataclass(frozen=True, slots=True)
class View:
    """What heads see: `blind` ones not what folds have taken, those with `mass` the pooled entries instead."""

    blind: frozenset[Cell]
    mass: frozenset[Cell] = frozenset()

    def sighted(self, cell: Cell) -> View:
        """With one head that sees everything."""
        return View(self.blind - {cell}, self.mass - {cell})

    def weighed(self, cell: Cell) -> View:
        """With the pooled entries in one head."""
        return View(self.blind, self.mass | {cell})


@dataclass(slots=True)
class Sight:
    """The attention of a model, causal and within the layer's window, in blocks of queries, with some heads blind.

    Queries at `gone[k]` and later do not see key `k` in a blind head; those at `since[s]` and later see pooled entry
    `s` in a head with mass.
    """

    view: View = View(frozenset())
    gone: Tensor | None = None  # [tokens]
    since: Tensor | None = None  # [spans]
    pooled: Entries | None = None  # [L, H, spans, D]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
        tokens, kv_heads = query.shape[2], key.shape[1]
        group, layer = query.shape[1] // kv_heads, module.layer_idx
        window = getattr(module, "sliding_window", None)
        blind = [head for head in range(kv_heads) if (layer, head) in self.view.blind]
        at = torch.arange(tokens, device=query.device)
        out = torch.empty_like(query)
        for start in range(0, tokens, BLOCK):
            stop = min(tokens, start + BLOCK)
            rows, columns = at[start:stop, None], at[:stop]
            seen = columns <= rows
            if window:
                seen = seen & (columns > rows - window)
            asked, keys, values = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
            if len(blind) < kv_heads:
                out[:, :, start:stop] = scaled_dot_product_attention(
                    asked, keys, values, attn_mask=seen, scale=scaling, enable_gqa=group > 1
                )
            for head in blind:
                own, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
                parts = self._left(layer, head, rows, seen, keys[:, one], values[:, one])
                out[:, own, start:stop] = scaled_dot_product_attention(
                    asked[:, own], parts.keys, parts.values, parts.bias, scale=scaling, enable_gqa=group > 1
                )
        return out.transpose(1, 2), None

    def _left(self, layer: int, head: int, rows: Tensor, seen: Tensor, keys: Tensor, values: Tensor) -> Entries:
        """What a blind head has left, `[1, 1, E, D]`, and the bias of each row `[rows, E]`."""
        assert self.gone is not None and self.since is not None and self.pooled is not None
        seen = seen & (rows < self.gone[: keys.shape[2]])
        bias = torch.zeros(seen.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~seen, -torch.inf)
        if (layer, head) not in self.view.mass:
            return Entries(keys, values, bias)
        mine = (part[layer, head].to(keys) for part in (self.pooled.keys, self.pooled.values, self.pooled.bias))
        more_keys, more_values, more_bias = mine
        late = more_bias.expand(len(rows), -1).masked_fill(rows < self.since, -torch.inf)
        return Entries(
            torch.cat((keys, more_keys[None, None]), 2),
            torch.cat((values, more_values[None, None]), 2),
            torch.cat((bias, late), 1),
        )


class Said(nn.Module):
    """Stands in for a layer whose output is known."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The known output, whatever comes in."""
        return self._hidden


@dataclass(frozen=True, slots=True)
class Needs:
    """What each head is worth `[layers, kv_heads]`: the fall of the loss in nats a token when it gets its tokens back.

    0 where it was never the one that helped most. `mass` is true where one pooled entry a span does instead; `tokens`
    were judged.
    """

    relief: Tensor
    mass: Tensor
    tokens: int


def search(model: Any, texts: Sequence[Text], conclusion: int) -> Needs:
    """Which heads need their tokens back when all heads keep only the `conclusion` of each span.

    All heads forget at the positions at which the engine would fold. Then, one after another, the head that helps most
    gets its tokens back, or one pooled entry a span where that does at least `ENOUGH` of it, until none helps by more
    than its standard error and `LEAST`. To blind one head of a sighted model would not find heads that do the same
    work: each covers for the other. Judged are the tokens behind a text's first fold. Layers below a head say what they
    said before and are not computed again. Raises UnsupportedError.
    """
    reader = Reader(model)
    shape = (len(reader.layers), int(model.config.num_key_value_heads))
    cells = frozenset((layer, head) for layer in range(shape[0]) for head in range(shape[1]))
    texts = [text for text in texts if _first(text) < len(text.ids) - 1]
    if not texts:
        raise UnsupportedError("texts", "no token comes behind a fold")
    relief, mass = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    view, tokens = View(cells), 0
    for _ in range(ROUNDS):
        ways = {cell: view.sighted(cell) for cell in sorted(view.blind)}
        falls = _falls(reader, texts, conclusion, view, ways)
        best = max(falls, key=lambda cell: falls[cell].mean().item())
        fall, tokens = falls[best], len(falls[best])
        worth, error = fall.mean().item(), fall.std(correction=0).item() / tokens**0.5
        if worth <= max(error, LEAST):
            break
        pooled = 0.0
        if best not in view.mass:
            pooled = _falls(reader, texts, conclusion, view, {best: view.weighed(best)})[best].mean().item()
        enough = pooled >= ENOUGH * worth
        print(
            f"layer {best[0]} head {best[1]}: {worth:.5f} ± {error:.5f} nats a token, {pooled:.5f} with a pooled entry",
            file=sys.stderr,
        )
        view = view.weighed(best) if enough else view.sighted(best)
        mass[best] |= enough
        relief[best] = 0.0 if enough else worth
    return Needs(relief, mass, tokens)


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
    """Reads texts with some heads blind."""

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
    def falls(self, text: Text, conclusion: int, view: View, ways: dict[Cell, View]) -> Iterator[Tensor]:
        """For each way to see, how far the loss of every token behind the first fold falls from that under `view`.

        A way differs from `view` in its own cell only.
        """
        device, sight = self._model.device, self._sight
        sight.gone = forgotten(len(text.ids), text.spans, conclusion).to(device)
        sight.since = torch.tensor([span.due + COMMIT_LAG for span in text.spans], device=device)
        sight.pooled = text.pooled
        ids, first = torch.tensor([list(text.ids)], device=device), _first(text)
        said = self._run(ids, [], view)
        before = self._losses(ids, first, said[-1])
        for (layer, _), way in ways.items():
            yield before - self._losses(ids, first, self._run(ids, said[:layer], way)[-1])

    def _run(self, ids: Tensor, said: Sequence[Tensor], view: View) -> list[Tensor]:
        """Outputs of the layers from the first that is not known on."""
        found: list[Tensor] = []
        known = [Said(hidden) for hidden in said]
        live = list(self.layers)[len(said) :]

        def keep(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            found.append(out)

        hooks = [layer.register_forward_hook(keep) for layer in live]
        self._sight.view = view
        try:
            self._with([*known, *live], ids)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _losses(self, ids: Tensor, first: int, final: Tensor) -> Tensor:
        """Nats of each token behind position `first`, where `final` is the last layer's output."""
        found, count = [], ids.shape[1] - 1
        for start in range(first, count, BLOCK):
            at = torch.arange(start, min(count, start + BLOCK), device=ids.device)
            logits = self._with([Said(final)] * len(self.layers), ids, at).double()
            found.append(cross_entropy(logits, ids[0, at + 1], reduction="none"))
        return torch.cat(found).cpu()

    def _with(self, layers: Sequence[nn.Module], ids: Tensor, at: Tensor | None = None) -> Tensor:
        """Logits `[n, vocabulary]` of the tokens `at` (default: none but the last) as these layers make them."""
        self._model.base_model.layers = nn.ModuleList(layers)
        try:
            return self._model(ids, use_cache=False, logits_to_keep=1 if at is None else at).logits[0]
        finally:
            self._model.base_model.layers = self.layers


def _falls(
    reader: Reader, texts: Sequence[Text], conclusion: int, view: View, ways: dict[Cell, View]
) -> dict[Cell, Tensor]:
    """The falls of all tokens of all texts, way by way."""
    found: dict[Cell, list[Tensor]] = {cell: [] for cell in ways}
    with tqdm(total=len(texts) * len(ways), unit="head", file=sys.stderr, leave=False) as bar:
        for text in texts:
            for cell, fall in zip(ways, reader.falls(text, conclusion, view, ways), strict=True):
                found[cell].append(fall)
                bar.update()
    return {cell: torch.cat(parts) for cell, parts in found.items()}


def _first(text: Text) -> int:
    """The position of the first fold."""
    return min((span.due + COMMIT_LAG for span in text.spans), default=NEVER)
