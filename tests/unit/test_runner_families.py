"""Five model families through ModelRunner against transformers' own forward; refusals at load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.runner import loader
from thinkfold.runner.adapter import IMPLEMENTATION, register
from thinkfold.runner.forward_batch import ForwardBatch
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.output import BatchRow, SampleRow, StepPlan
from thinkfold.types import SamplingParams

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 12},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
GREEDY = SamplingParams(temperature=0.0, logprobs=20)


def checkpoint(folder: Path, model_type: str, **changes: Any) -> PretrainedConfig:
    """Save a tiny random model and return its config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, **FAMILIES[model_type], **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return config


def engine_config(folder: Path, **changes: Any) -> EngineConfig:
    options = {"device": "cpu", "kv_cache_bytes": 1 << 22, "page_size": 8, "max_num_seqs": 8}
    return EngineConfig(model=str(folder), **{**options, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers_in_mixed_chunks(family: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, family)
    runner = ModelRunner(engine_config(tmp_path))
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rng = random.Random(1)
    texts = [[rng.randrange(97) for _ in range(n)] for n in (37, 50, 5, 44)]
    with torch.no_grad():
        expected = [own(torch.tensor([t])).logits[0].log_softmax(-1) for t in texts]
    done = [0] * len(texts)
    pages = rng.sample(range(runner.num_pages), 28)
    compared = 0
    for step in range(200):
        rows = []
        for slot, text in enumerate(texts):
            n = min(rng.choice([0, 1, 1, 2, 7, 20]), len(text) - done[slot])
            if n:
                end = done[slot] + n
                sample = SampleRow(slot, GREEDY, 0, 0, end)
                rows.append(
                    BatchRow(
                        slot,
                        text[done[slot] : end],
                        False,
                        done[slot],
                        done[slot],
                        pages[slot * 7 : slot * 7 + 7],
                        [sample],
                    )
                )
                done[slot] = end
        if not rows:
            continue
        result = runner.collect(runner.launch(StepPlan(step, rows)))
        for row, token, logprobs in zip(rows, result.token_ids, result.logprobs, strict=True):
            reference = expected[row.slot][done[row.slot] - 1]
            assert logprobs is not None and token == logprobs.top[0][0]
            for token_id, value in logprobs.top:
                assert value == pytest.approx(float(reference[token_id]), abs=1e-4)
                compared += 1
        if done == [len(t) for t in texts]:
            break
    assert done == [len(t) for t in texts] and compared > 500


def test_a_model_compiles_whole_and_once(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, "qwen3")
    register()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=IMPLEMENTATION).eval()
    count = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        nonlocal count
        count += 1
        return graph.forward

    def forward(input_ids: Tensor, position_ids: Tensor, keep: Tensor, batch: ForwardBatch) -> Tensor:
        return model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=keep, forward_batch=batch
        ).logits

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for tokens in (8, 12, 20, 21):
        ids = torch.arange(tokens)[None]
        slots = torch.arange(tokens)
        for tensor, dim in ((ids, 1), (slots, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        batch = ForwardBatch(
            kv=torch.zeros(4, config.num_hidden_layers, 2, 2, 8, 16),
            cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
            kv_lens=torch.tensor([tokens], dtype=torch.int32),
            page_table=torch.arange(3, dtype=torch.int32)[None],
            slot_mapping=slots,
            summary_rows=torch.full((1,), -1),
            summary_table=torch.zeros(config.num_hidden_layers, 0, 2, 0, dtype=torch.int32),
            summary_lens=torch.zeros(config.num_hidden_layers, 0, 2, dtype=torch.int32),
            bias=torch.zeros(0),
            kv_scales=torch.zeros(0, dtype=torch.float16),
            query_sink_rows=torch.zeros(0, dtype=torch.int64),
            query_sink=torch.zeros(config.num_hidden_layers, 0, 4, 16),
            lse_sink=torch.zeros(config.num_hidden_layers, 0, 4),
        )
        with torch.no_grad():
            got = compiled(ids, ids, torch.tensor([0, 5]), batch)
            torch.testing.assert_close(got, forward(ids, ids, torch.tensor([0, 5]), batch))
    assert count == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"attn_logit_softcapping": 30.0}, "softcap"),
        ({"kv_lora_rank": 16}, "MLA"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"is_encoder_decoder": True}, "encoder"),
    ],
)
def test_what_attention_cannot_honour_is_refused_with_the_way_out(changes: dict[str, Any], word: str) -> None:
    config = AutoConfig.for_model("llama", **TINY)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedError, match=word) as caught:
        loader.check_supported(config)
    assert "; serve it with another engine, such as vLLM or SGLang" in str(caught.value)


def test_sinks_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt_oss", **{**TINY, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16}
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="gpt_oss"):
        loader.load(engine_config(tmp_path, load_format="dummy"))


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot load") as caught:
        loader.load(engine_config(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **TINY, head_dim=16).save_pretrained(tmp_path)
    runner = ModelRunner(engine_config(tmp_path, load_format="dummy"))
    assert (runner.vocab_size, runner.model_type, runner.eos_token_ids) == (97, "qwen3", (1,))


def test_lengths_beyond_the_model_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    with pytest.raises(ParameterError, match="max_model_len"):
        ModelRunner(engine_config(tmp_path, max_model_len=257))
    assert ModelRunner(engine_config(tmp_path, max_model_len=100)).max_model_len == 100
