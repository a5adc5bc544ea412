"""Layers put in place of a model's own on a CPU: equal results, equal bits, and nothing unknown is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from thinkfold.runner import cpu_fusion, cpu_layers
from thinkfold.runner.cpu_block import DecoderBlock
from thinkfold.runner.cpu_layers import FusedRMSNorm, PackedLinear, fused_norm
from thinkfold.runner.invariance import invariant_tile, row_sums, row_tile, threads_change_no_bit

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
USUAL: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.5},  # looks like a Llama
    "llama": {"hidden_act": "gelu"},
    "olmo2": {},
    "phi3": {},
    "glm": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, told: list[Any], **kwargs: Any
) -> tuple[Tensor, None]:
    """Looks at one token at a time, as the bits of a row must not depend on its neighbours."""
    told.append({name: kwargs.get(name) for name in ("scaling", "sliding_window")} | {"layer": module.layer_idx})
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return (query * key + value).transpose(1, 2).contiguous(), None


def build(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    AttentionInterface.register("told", attend)
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="told").eval().requires_grad_(False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                weight.uniform_(0.5, 1.5)
    return model


def logits(model: PreTrainedModel, ids: Tensor, positions: Tensor, told: list[Any]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=positions, use_cache=False, told=told).logits[0]


@pytest.mark.parametrize("model_type", USUAL)
def test_blocks_do_what_the_layers_did(model_type: str) -> None:
    model = build(model_type, USUAL[model_type])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (1, 23), generator=generator)
    positions = torch.randint(0, 256, (1, 23), generator=generator)
    before: list[Any] = []
    after: list[Any] = []
    expected = logits(model, ids, positions, before)
    assert cpu_fusion.fuse(model) == 2
    cpu_layers.speed_up(model)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    torch.testing.assert_close(logits(model, ids, positions, after), expected, rtol=1e-4, atol=1e-4)
    assert before == after  # scale, window and layer, as the attention is told


@pytest.mark.parametrize("model_type", OTHERS)
def test_layers_of_another_form_stay(model_type: str) -> None:
    model = build(model_type, OTHERS[model_type])
    layers = list(model.model.layers)
    assert cpu_fusion.fuse(model) == 0
    assert list(model.model.layers) == layers
    assert model.config._attn_implementation == "told"
    assert not any(layer._forward_hooks for layer in layers)


def test_only_layers_that_repeat_the_trial_are_replaced() -> None:
    model = build("qwen3", {"num_hidden_layers": 3})
    odd = model.model.layers[1]
    odd.register_forward_hook(lambda module, args, output: output * 1.01)
    assert cpu_fusion.fuse(model) == 2
    assert model.model.layers[1] is odd
    assert all(isinstance(model.model.layers[i], DecoderBlock) for i in (0, 2))


@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "sizes", "threads"),
    [
        ("qwen2", {}, 1),  # odd sizes: a vector loop has a tail
        ("qwen3", {}, 1),
        ("qwen3", {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 64}, 1),
        ("qwen3", {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 64}, 2),
    ],
)
def test_a_row_has_the_same_bits_among_any_others(
    model_type: str, sizes: dict[str, int], threads: int, checkpoint: torch.dtype
) -> None:
    before = torch.get_num_threads()
    try:
        model = build(model_type, sizes).to(checkpoint).float()
        assert cpu_fusion.fuse(model) == 2
        cpu_layers.speed_up(model)
        torch.set_num_threads(1)
        tile = invariant_tile(model)
        if tile is None:
            pytest.skip("matrix products change with the batch on this machine")
        ids = torch.arange(70 * tile)[None] % 97
        whole = logits(model, ids, ids, [])
        torch.set_num_threads(threads)
        for lo in (0, 5):
            for n in (1, 2, 3, 4, 7, 16, 17, 33, 65):
                part = slice(lo * tile, (lo + n) * tile)
                assert torch.equal(logits(model, ids[:, part], ids[:, part], []), whole[part]), n
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("odd", "tile"), [(set(), 1), ({1, 2}, 3), (set(range(6)), None)])
def test_rows_are_padded_as_their_products_need_it(
    odd: set[int], tile: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`odd`: what is left of a cut into sixes where the last row has bits of its own, as with FBGEMM and AVX2."""

    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = torch.zeros(len(input), self.out_features)
            out[-1] = len(input) * (len(input) % 6 in odd)
            return out

    model = nn.Sequential(Odd(48, 97, bias=False))
    assert invariant_tile(model) == tile
    assert row_tile(model) == (tile or 1)
    assert ("equal bits are not promised" in caplog.text) is (tile is None)


def test_a_product_that_changes_with_threads_is_found() -> None:
    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * (1 + torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = build("qwen3", {})
        cpu_fusion.fuse(model)
        cpu_layers.speed_up(model)
        assert threads_change_no_bit(model)
        model.lm_head = Odd(48, 97, bias=False).requires_grad_(False)
        assert not threads_change_no_bit(model)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sums_of_long_rows_do_not_depend_on_their_number() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = torch.randn(7, 40_000, generator=torch.Generator().manual_seed(0))
        whole = row_sums(rows)
        assert all(torch.equal(row_sums(rows[:n]), whole[:n]) for n in range(1, 8))
    finally:
        torch.set_num_threads(before)


def test_several_linear_layers_are_one_product() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(40, 24), nn.Linear(40, 8, bias=False), nn.Linear(40, 16)]
    rows = torch.randn(3, 40)
    with torch.inference_mode():
        expected = torch.cat([linear(rows) for linear in linears], dim=-1)
        packed = PackedLinear(*linears)
        torch.testing.assert_close(packed(rows), expected)
    assert (packed.in_features, packed.out_features) == (40, 48)
    assert PackedLinear(linears[1]).bias is None


@pytest.mark.skipif(torch.backends.quantized.engine not in cpu_layers.FBGEMM, reason="needs FBGEMM")
@pytest.mark.parametrize("size", [1e-9, 0.05, 1e9])
def test_weights_of_a_bf16_checkpoint_are_read_in_16_bits_and_lose_nothing(size: float) -> None:
    source = torch.Generator().manual_seed(0)
    linear = nn.Linear(384, 72).requires_grad_(False)
    linear.weight.copy_((torch.randn(72, 384, generator=source) * size).bfloat16())
    linear.bias.mul_(size)
    linear.weight[0, :3] = torch.tensor([size * 2**-30, 0.0, -size * 2**-60]).bfloat16()
    rows = torch.randn(9, 384, generator=source)
    packed, exact = PackedLinear(linear), (rows.double() @ linear.weight.double().T + linear.bias.double()).float()
    assert packed.scale != 1.0
    assert (packed(rows) - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert torch.equal(PackedLinear(linear, divided=True)(rows / packed.scale), packed(rows))
    assert torch.equal(packed.added(rows, rows[:, :72]), rows[:, :72] + packed(rows))
    linear.weight[5, 7] *= 1 + 2**-12  # a weight of 24 bits
    assert PackedLinear(linear).scale == 1.0
    linear.weight.zero_()
    assert torch.equal(PackedLinear(linear)(rows), linear.bias.expand(9, -1))


def test_a_norm_of_another_form_is_none() -> None:
    class Shifted(nn.Module):
        variance_epsilon = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, rows: Tensor) -> Tensor:
            return nn.functional.rms_norm(rows, (16,), 1 + self.weight, self.variance_epsilon)

    assert fused_norm(Shifted()) is None
    assert fused_norm(nn.LayerNorm(16)) is None


def test_small_rows_are_normed_with_their_eps() -> None:
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 1e-3
    weight = torch.linspace(0.5, 2.0, 16)
    expected = nn.functional.rms_norm(rows.double(), (16,), weight.double(), 1e-6)
    torch.testing.assert_close(FusedRMSNorm(weight, 1e-6)(rows).double(), expected, rtol=1e-6, atol=0.0)
