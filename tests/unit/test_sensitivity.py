"""What the loss says of a head: one head alone is blind, and only to what a fold would have taken by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thinkfold.cli import sensitivity
from thinkfold.cli.sensitivity import NEVER, Blind, Reader, Sensitivity, forgotten, measure
from thinkfold.errors import UnsupportedError
from thinkfold.fold.planner import COMMIT_LAG
from thinkfold.fold.spans import Span

LAYERS, HEADS, TOKENS = 2, 2, 40
SPANS = [Span(8, 16, 20, (6, 10)), Span(16, 24, 28, (2, 8))]
IDS = torch.randint(0, 32, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()


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


def masked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Attention by the book, in which head 1 of layer 0 sees of the spans what `forgotten` leaves."""
    group, seen = query.shape[1] // key.shape[1], torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen = seen.expand(query.shape[1], -1, -1).clone()
    if module.layer_idx == 0:
        for q in range(TOKENS):
            for k in range(TOKENS):
                folded = any(s.start <= k < s.end and q >= s.due + COMMIT_LAG for s in SPANS)
                stays = any(s.start <= k < s.end and any(0 < s.start + e - k <= 3 for e in s.ends) for s in SPANS)
                if folded and not stays:
                    seen[group : 2 * group, q, k] = False
    keys, values = (part.repeat_interleave(group, 1) for part in (key, value))
    logits = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    return (logits.softmax(-1) @ values).transpose(1, 2), None


def test_forgotten_is_what_lies_before_no_end_and_only_when_the_fold_is_committed() -> None:
    gone = forgotten(TOKENS, SPANS, 3).tolist()
    first, second = 20 + COMMIT_LAG, 28 + COMMIT_LAG
    assert gone[:8] == [NEVER] * 8 and gone[24:] == [NEVER] * 16
    assert gone[8:16] == [first] * 3 + [NEVER] * 3 + [first] + [NEVER]  # ends at 6, and at 10, behind the span
    assert gone[16:24] == [NEVER] * 2 + [second] * 3 + [NEVER] * 3  # an end 2 tokens into it
    assert forgotten(TOKENS, SPANS[:1], 0)[8:16].tolist() == [first] * 8
    assert forgotten(10, [], 3).tolist() == [NEVER] * 10


@pytest.mark.parametrize("block", [7, 512])
def test_a_blind_head_is_as_attention_by_the_book(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    from transformers import AttentionInterface

    monkeypatch.setattr(sensitivity, "BLOCK", block)
    model, first = tiny(), 20 + COMMIT_LAG
    full = losses(model)
    AttentionInterface.register("by_the_book", masked)
    model.set_attn_implementation("by_the_book")
    wanted = losses(model) - full
    rises = list(Reader(model).rises(IDS, first, forgotten(TOKENS, SPANS, 3), [(0, 1), (1, 0)]))
    assert wanted[:first].abs().max() < 1e-4 < wanted[first:].abs().min()
    torch.testing.assert_close(rises[0], wanted[first:], atol=1e-4, rtol=1e-4)
    assert (rises[1] - rises[0]).abs().max() > 1e-3


@pytest.mark.parametrize("layer", range(LAYERS))
def test_known_layers_are_not_computed_again_and_say_the_same(layer: int) -> None:
    model, blind = tiny(), Blind(layer, 1, forgotten(TOKENS, SPANS, 3))
    reader, text = Reader(model), torch.tensor([IDS])
    said = reader._run(text, [], None)
    calls: list[int] = []
    for at, module in enumerate(model.base_model.layers):
        module.register_forward_hook(lambda *_, at=at: calls.append(at))
    short = reader._run(text, said[:layer], blind)
    assert calls == list(range(layer, LAYERS))
    torch.testing.assert_close(short[-1], reader._run(text, [], blind)[-1])
    assert not torch.equal(short[-1], said[-1])
    assert list(model.base_model.layers) == list(reader.layers)


def test_who_sees_everything_loses_nothing() -> None:
    model = tiny()
    cells = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    for rise in Reader(model).rises(IDS, 3, torch.full((TOKENS,), NEVER), cells):
        assert len(rise) == TOKENS - 4 and not rise.any()
    found = measure(model, [(IDS, SPANS)], 8)  # every token of a span lies before some end
    assert not found.rise.any() and not found.needs.any()


def test_a_layer_with_a_window_does_not_miss_what_lies_behind_it() -> None:
    spans = [Span(8, 16, 24, (8,))]  # gone from 28 on, 12 positions behind its last token
    found = measure(tiny(5), [(IDS, spans)], 0)
    assert found.rise[0].abs().min() > 1e-4 and not found.rise[1].any()


def test_measure_takes_the_mean_over_tokens_of_all_texts_behind_their_first_fold() -> None:
    model = tiny()
    texts = [(IDS, SPANS), (IDS[::-1], SPANS[1:]), (IDS, []), (IDS[:25], SPANS)]
    found = measure(model, texts, 3)
    reader, rises = Reader(model), []
    for (ids, spans), first in zip(texts[:2], (20 + COMMIT_LAG, 28 + COMMIT_LAG), strict=True):
        rises.append(next(reader.rises(ids, first, forgotten(TOKENS, spans, 3), [(1, 0)])))
    rise = torch.cat(rises)
    assert found.tokens == len(rise) == (TOKENS - 1 - 20 - COMMIT_LAG) + (TOKENS - 1 - 28 - COMMIT_LAG)
    torch.testing.assert_close(found.rise[1, 0], rise.mean())
    torch.testing.assert_close(found.error[1, 0], rise.std(correction=0) / len(rise) ** 0.5)


def test_noise_and_gains_are_no_need() -> None:
    rise, error = torch.tensor([[0.3, 0.01], [-0.2, 0.0]]), torch.tensor([[0.1, 0.02], [0.01, 0.0]])
    assert Sensitivity(rise, error, 9).needs.tolist() == [[pytest.approx(0.3), 0.0], [0.0, 0.0]]


def test_what_cannot_be_measured_is_refused() -> None:
    model = tiny()
    with pytest.raises(UnsupportedError, match="no token comes behind a fold"):
        measure(model, [(IDS[:24], SPANS)], 3)
    model.base_model.layers = torch.nn.Sequential(*model.base_model.layers)
    with pytest.raises(UnsupportedError, match="--by attention"):
        Reader(model)
