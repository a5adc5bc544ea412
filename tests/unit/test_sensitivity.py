"""What the loss says of a head: one head alone is blind, and only to what a fold would have taken by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thinkfold.cli import sensitivity
from thinkfold.cli.sensitivity import NEVER, Reader, Text, View, forgotten, search
from thinkfold.errors import UnsupportedError
from thinkfold.fold.planner import COMMIT_LAG
from thinkfold.fold.segments import Entries
from thinkfold.fold.spans import Span

LAYERS, HEADS, TOKENS = 2, 2, 40
SPANS = [Span(8, 16, 20, (6, 10)), Span(16, 24, 28, (2, 8))]
RANDOM = torch.Generator().manual_seed(2)
IDS = torch.randint(0, 32, (TOKENS,), generator=RANDOM).tolist()
POOLED = Entries(*torch.randn(2, LAYERS, HEADS, len(SPANS), 8, generator=RANDOM), torch.ones(LAYERS, HEADS, len(SPANS)))
TEXT = Text(IDS, SPANS, POOLED)
FIRST = SPANS[0].due + COMMIT_LAG
CELLS = frozenset((layer, head) for layer in range(LAYERS) for head in range(HEADS))
ALL = View(frozenset())


def tiny(window: int | None = None) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=8,
        initializer_range=0.5,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention" if window else "full_attention"],
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def losses(model: Any) -> Tensor:
    logits = model(torch.tensor([IDS]), use_cache=False).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="none")


def masked(mass: bool) -> Any:
    """Attention by the book, in which head 1 of layer 0 sees of the spans what `forgotten` leaves, and pooled ones."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group, seen = query.shape[1] // key.shape[1], torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        seen = seen.expand(query.shape[1], -1, -1).clone()
        later = torch.full((query.shape[1], TOKENS, len(SPANS)), -torch.inf)
        for q in range(TOKENS if module.layer_idx == 0 else 0):
            for number, s in enumerate(SPANS):
                folded = q >= s.due + COMMIT_LAG
                for k in range(s.start, s.end):
                    if folded and not any(0 < s.start + e - k <= 3 for e in s.ends):
                        seen[group : 2 * group, q, k] = False
                if folded and mass:
                    later[group : 2 * group, q, number] = POOLED.bias[0, 1, number]
        keys, values = (part.repeat_interleave(group, 1) for part in (key, value))
        more = [p[module.layer_idx].repeat_interleave(group, 0)[None] for p in (POOLED.keys, POOLED.values)]
        own = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
        logits = torch.cat((own, query @ more[0].transpose(-1, -2) * scaling + later), -1)
        return (logits.softmax(-1) @ torch.cat((values, more[1]), 2)).transpose(1, 2), None

    return attend


def test_forgotten_is_what_lies_before_no_end_and_only_when_the_fold_is_committed() -> None:
    gone = forgotten(TOKENS, SPANS, 3).tolist()
    first, second = 20 + COMMIT_LAG, 28 + COMMIT_LAG
    assert gone[:8] == [NEVER] * 8 and gone[24:] == [NEVER] * 16
    assert gone[8:16] == [first] * 3 + [NEVER] * 3 + [first] + [NEVER]  # ends at 6, and at 10, behind the span
    assert gone[16:24] == [NEVER] * 2 + [second] * 3 + [NEVER] * 3  # an end 2 tokens into it
    assert forgotten(TOKENS, SPANS[:1], 0)[8:16].tolist() == [first] * 8
    assert forgotten(10, [], 3).tolist() == [NEVER] * 10


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("block", [7, 512])
def test_a_blind_head_is_as_attention_by_the_book(monkeypatch: pytest.MonkeyPatch, block: int, mass: bool) -> None:
    from transformers import AttentionInterface

    monkeypatch.setattr(sensitivity, "BLOCK", block)
    model = tiny()
    full = losses(model)
    AttentionInterface.register("by_the_book", masked(mass))
    model.set_attn_implementation("by_the_book")
    wanted = full - losses(model)
    blind = View(frozenset({(0, 1)}), frozenset({(0, 1)} if mass else ()))
    (fall,) = Reader(model).falls(TEXT, 3, ALL, {(0, 1): blind})
    assert wanted[:FIRST].abs().max() < 1e-4 < wanted[FIRST:].abs().min()
    torch.testing.assert_close(fall, wanted[FIRST:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_known_layers_are_not_computed_again_and_say_the_same(layer: int) -> None:
    model = tiny()
    reader, calls = Reader(model), []
    for at, module in enumerate(model.base_model.layers):
        module.register_forward_hook(lambda *_, at=at: calls.append(at))
    view = View(CELLS)
    (short,) = reader.falls(TEXT, 3, view, {(layer, 1): view.sighted((layer, 1))})
    assert calls == [*range(LAYERS), *range(layer, LAYERS)]
    (whole,) = reader.falls(TEXT, 3, view, {(0, 0): view.sighted((layer, 1))})
    torch.testing.assert_close(short, whole)
    assert short.any() and list(model.base_model.layers) == list(reader.layers)


def test_who_sees_everything_has_nothing_to_win() -> None:
    found = search(tiny(), [TEXT], 8)  # every token of a span lies before some end
    assert not found.relief.any() and not found.mass.any() and found.tokens == TOKENS - 1 - FIRST


def test_a_layer_with_a_window_does_not_miss_what_lies_behind_it() -> None:
    spans = [Span(8, 16, 24, (8,))]  # gone from 28 on, 12 positions behind its last token
    views = {(layer, 0): View(frozenset({(layer, 0)})) for layer in range(LAYERS)}
    first, second = Reader(tiny(5)).falls(Text(IDS, spans, POOLED), 0, ALL, views)
    assert first.abs().max() > 1e-4 and not second.any()


def test_the_head_that_helps_most_gets_its_tokens_back_until_none_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = {(0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.1, (1, 1): 0.3}

    def scripted(_: Reader, text: Text, conclusion: int, view: View, ways: dict[Any, View]) -> Any:
        assert conclusion == 3
        for cell, way in ways.items():
            gain = worth[cell] if cell not in view.mass else 0.0
            if cell == (1, 0) and (1, 1) in view.blind - view.mass:
                gain = -0.2  # of no use while the other is blind
            share = {(1, 1): 0.9}.get(cell, 0.2) if cell in way.mass else 1.0
            yield torch.full((10,), gain * share)

    monkeypatch.setattr(Reader, "falls", scripted)
    found = search(tiny(), [TEXT, Text(IDS[:25], SPANS, POOLED)], 3)
    assert found.relief.tolist() == [[0.5, 0.0], [pytest.approx(0.1), 0.0]]
    assert found.mass.tolist() == [[False, False], [False, True]], "one pooled entry does most of what its tokens do"
    assert found.tokens == 10, "of the second text nothing comes behind the first fold"


@pytest.mark.parametrize("falls", [[0.004, -0.003, 0.0, 0.0], [5e-5, 5e-5, 5e-5, 5e-5], [-1.0, -1.0, -1.0, -1.0]])
def test_noise_and_harm_are_no_need(monkeypatch: pytest.MonkeyPatch, falls: list[float]) -> None:
    monkeypatch.setattr(Reader, "falls", lambda *args: (torch.tensor(falls) for _ in args[-1]))
    found = search(tiny(), [TEXT], 3)
    assert not found.relief.any() and not found.mass.any()


def test_what_cannot_be_measured_is_refused() -> None:
    model = tiny()
    with pytest.raises(UnsupportedError, match="no token comes behind a fold"):
        search(model, [Text(IDS[:24], SPANS, POOLED)], 3)
    model.base_model.layers = torch.nn.Sequential(*model.base_model.layers)
    with pytest.raises(UnsupportedError, match="--by attention"):
        Reader(model)
