"""The check at start of what fp8 KV does to a model's attention, on its own rows."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from thinkfold.attention.fp8 import FP8
from thinkfold.config import EngineConfig
from thinkfold.pebble import pebble_path
from thinkfold.runner.attention_facts import AttentionFacts
from thinkfold.runner.kv_check import TOLERANCE, output_squares
from thinkfold.runner.model_runner import ModelRunner

MEMORY = 1 << 24


def start(dtype: str, folder: Path, scale_k: float = 1.0, scale_q: float = 1.0) -> ModelRunner:
    """Pebble with another size of one pair of channels, which rope turns together, in layer 3's keys and queries."""
    if not folder.exists():
        shutil.copytree(pebble_path(), folder)
    weights = load_file(Path(pebble_path()) / "model.safetensors")
    for name, scale in (("k_norm", scale_k), ("q_norm", scale_q)):
        weight = weights[f"model.layers.3.self_attn.{name}.weight"].float()
        weight[[5, 5 + len(weight) // 2]] *= scale
        weights[f"model.layers.3.self_attn.{name}.weight"] = weight
    save_file({name: weight.float() for name, weight in weights.items()}, folder / "model.safetensors")
    return ModelRunner(
        EngineConfig(
            str(folder),
            dtype="float32",
            kv_cache_dtype=dtype,  # type: ignore[arg-type]
            max_model_len=256,
            max_num_seqs=2,
            kv_cache_bytes=MEMORY,
        )
    )


def test_auto_takes_fp8_where_attention_stays_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = start("auto", tmp_path / "m")
    assert runner.kv_dtype == FP8
    assert runner.fp8_error is not None and 0.001 < runner.fp8_error < TOLERANCE
    assert "KV is stored as torch.float8_e4m3fn" in caplog.text
    plain = start("model", tmp_path / "m")
    assert (plain.kv_dtype, plain.fp8_error) == (torch.float32, None)
    assert runner.num_pages > 3 * plain.num_pages


def test_case_44_a_key_channel_of_a_thousand_that_queries_weigh_as_little_does_no_harm(tmp_path: Path) -> None:
    usual, outlier = start("auto", tmp_path / "m"), start("auto", tmp_path / "m", 1e3, 1e-3)
    assert outlier.kv_dtype == FP8
    assert outlier.fp8_error == pytest.approx(usual.fp8_error, abs=0.03)


@pytest.mark.parametrize("scale", [1e3, 1e12])
def test_case_44_a_key_channel_that_decides_all_keeps_the_models_dtype(
    scale: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits of thousands, of which fp8 moves each by a few percent; and rows that no scale can hold."""
    runner = start("auto", tmp_path / "m", scale)
    assert runner.kv_dtype == torch.float32
    assert runner.fp8_error is not None and TOLERANCE < runner.fp8_error <= 1.0
    with caplog.at_level(logging.WARNING):
        asked = start("fp8_e4m3", tmp_path / "m", scale)
    assert asked.kv_dtype == FP8 and asked.fp8_error == runner.fp8_error
    assert "of layer 3 by" in caplog.text


def test_the_error_is_of_what_each_query_sees() -> None:
    """A key that only a hidden position holds, or one behind the window, changes nothing."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 1, 12, 8, generator=generator).double()
    queries = torch.randn(2, 2, 4, 8, generator=generator).double()
    facts = AttentionFacts(0.35, torch.tensor([False, True]), None, 4)

    def output_errors(values: torch.Tensor) -> torch.Tensor:
        moved, whole = output_squares(queries, keys, values, [5, 6], facts).unbind(1)
        return (moved / whole).sqrt()

    errors = output_errors(values)
    assert ((errors > 0.005) & (errors < 0.1)).all()
    later, earlier = values.clone(), values.clone()
    later[:, :, 7:] = torch.nan
    assert torch.equal(output_errors(later.nan_to_num(1e5)), errors)
    earlier[:, :, :2] = 1e5
    changed = output_errors(earlier)
    assert changed[0] != errors[0]
    assert changed[1] == errors[1]
