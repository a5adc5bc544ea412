"""The training recipe: its forward equals transformers', packing keeps texts whole, decoding is exact."""

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from thinkfold.pebble import pebble_path
from training.data import UNLEARNED_BIT, TextSource, Window, batch_of, pack, windows
from training.evaluate import Measure, canonical, summary
from training.generate import Decoder, Job
from training.mixture import LISTS, STAGES, draw
from training.model import Pebble, Shape
from training.optimizer import Optimizer, orthogonal
from training.train import WARMUP_STEPS, export, rate_factor, stage_at

SMALL = {"hidden": 64, "inner": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}


def small_model() -> Pebble:
    torch.manual_seed(0)
    model = Pebble(replace(Shape.read(pebble_path()), **SMALL), torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def small_config() -> Qwen3Config:
    config = Qwen3Config.from_pretrained(pebble_path())
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 96, 2
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.layer_types = config.layer_types[:2]
    return config


def test_forward_equals_transformers_on_packed_texts() -> None:
    model, reference = small_model(), Qwen3ForCausalLM(small_config()).float().eval()
    reference.load_state_dict(model.state_dict() | {"lm_head.weight": model.model.embed_tokens.weight})
    ids = torch.randint(0, 1536, (150,))
    bounds = torch.tensor([0, 50, 150], dtype=torch.int32)
    positions = torch.cat((torch.arange(50), torch.arange(100)))
    with torch.no_grad():
        ours = model.logits(ids, positions, bounds, 100)
        theirs = torch.cat([reference(ids[None, a:b]).logits[0] for a, b in ((0, 50), (50, 150))])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(not (pebble_path() / "model.safetensors").exists(), reason="weights are made by training")
def test_shipped_weights_load_and_fit_the_size() -> None:
    model = AutoModelForCausalLM.from_pretrained(pebble_path())
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.bfloat16
    assert sum(path.stat().st_size for path in pebble_path().iterdir()) <= 32 * 2**20


def test_export_loads_in_transformers(tmp_path: Path) -> None:
    model = Pebble(Shape.read(pebble_path()), torch.float32)
    export(model, tmp_path, pebble_path())
    loaded, info = cast(Any, AutoModelForCausalLM).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())


def test_an_update_lowers_the_loss() -> None:
    model = small_model()
    optimizer = Optimizer(model)
    source = TextSource(pebble_path(), "loss")
    window = next(windows(source, 1024, cast(Any, SimpleNamespace(value=0))))
    batch = batch_of([window])
    arrays = [torch.from_numpy(x) for x in (batch.ids, batch.labels, batch.positions, batch.bounds)]
    losses = []
    for _ in range(8):
        loss = model.loss(*arrays, batch.longest)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    again = Optimizer(model)
    again.load_state_dict(optimizer.state_dict())


def test_nothing_learned_is_no_nan() -> None:
    ids = torch.zeros(4, dtype=torch.long)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    assert small_model().loss(ids, torch.full((4,), -100), torch.arange(4), bounds, 4).item() == 0.0


def test_muon_update_is_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 32, 80)).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_packing_keeps_texts_whole_and_fills_the_window() -> None:
    rng = Random(0)
    pool = [np.full(rng.randint(5, 60), k, dtype=np.uint16) for k in range(40)]
    sizes = {k: len(text) for k, text in enumerate(pool)}
    window = pack(pool, 256, pad=999)
    assert len(window.ids) == sum(window.lengths) == 256
    start = 0
    for length in window.lengths:
        text = window.ids[start : start + length]
        assert len(set(text.tolist())) == 1
        assert int(text[0]) == 999 | UNLEARNED_BIT or sizes[int(text[0])] == length
        start += length


def test_batches_learn_only_unmarked_tokens_inside_one_text() -> None:
    ids = np.array([5 | UNLEARNED_BIT, 6 | UNLEARNED_BIT, 7, 8, 9 | UNLEARNED_BIT, 4], dtype=np.uint16)
    batch = batch_of([Window(ids, [4, 2])])
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.labels.tolist() == [-100, 7, 8, -100, 4, -100]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert (batch.bounds.tolist(), batch.longest) == ([0, 4, 6], 4)


def test_schedule_warms_up_and_ends_at_zero() -> None:
    assert rate_factor(0.0, 0) == 1 / WARMUP_STEPS
    assert rate_factor(0.3, 5000) == 1.0
    assert rate_factor(1.0, 5000) == 0.0
    assert [stage_at(share) for share in (0.0, 0.3, 0.9)] == [0, 1, 2]


def test_stages_draw_from_their_lists() -> None:
    rng = Random(0)
    short = [(task, size) for _, _, task, size in LISTS[0]]
    assert all(draw(0, rng) in short for _ in range(200))
    assert all(abs(sum(stage) - 1) < 1e-9 for stage in STAGES)


def test_batched_decoding_equals_the_full_forward() -> None:
    model = small_model().eval()
    model.shape = replace(model.shape, longest=96)
    jobs = [Job([5, 6, 7, 8 + k] * (k + 1)) for k in range(5)]
    Decoder(model, slots=3, ends=[1532]).run(jobs)
    for job in jobs:
        ids = torch.tensor(job.prompt + job.output)
        with torch.no_grad():
            logits = model.logits(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]), len(ids))
        assert logits.argmax(-1)[len(job.prompt) - 1 : -1].tolist() == job.output


def test_evaluation_counts_and_votes(tmp_path: Path) -> None:
    assert canonical("<think>\\boxed{1}</think>\n\nThe answer is \\boxed{1 2}.") == "12"
    assert canonical("<think>\\boxed{1}") == "1"
    rows: list[dict[str, object]] = [
        {"correct": 1.0, "thinking": 10, "finished": True, "majority": 1.0, "sampled": 0.5},
        {"correct": 0.0, "thinking": 30, "finished": False, "majority": 1.0, "sampled": 0.5},
    ]
    expected = {"n": 2, "pass@1": 0.5, "thinking": 20, "longest": 30, "unfinished": 1, "maj@k": 1.0, "sampled": 0.5}
    assert summary(rows) == expected
    export(small_model(), tmp_path, pebble_path())
    options = {"folder": tmp_path, "device": "cpu", "slots": 2, "attention": "flash", "own_scorer": True}
    measure = Measure(argparse.Namespace(**options, temperature=0.7))
    assert measure.decoder.shape.hidden == 64
