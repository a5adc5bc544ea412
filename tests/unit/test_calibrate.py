"""`thinkfold calibrate`, the recording of a model's attention, and the table that ships with Pebble."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from thinkfold.cli import calibrate, sensitivity, traces
from thinkfold.cli.capture import read, use_tape
from thinkfold.cli.main import main
from thinkfold.config import EngineConfig
from thinkfold.engine.language import load_language
from thinkfold.errors import ParameterError
from thinkfold.fold.budgets import BUDGETS_FILE, FoldBudgets
from thinkfold.fold.segments import Entries
from thinkfold.fold.spans import Span
from thinkfold.pebble import pebble_path
from thinkfold.types import FOLD_PROFILES

LAYERS, HEADS = 8, 2  # Pebble's


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    rng = Random(0)
    paths = [tmp_path / f"{name}.txt" for name in ("one", "two")]
    for path in paths:
        path.write_text("".join(f"{rng.randrange(1000)} + {rng.randrange(1000)}\n" for _ in range(400)))
    return [str(path) for path in paths]


@pytest.fixture
def shallow(tmp_path: Path) -> str:
    """The first two layers of Pebble: each head of each layer is searched for by itself, which takes time."""
    folder = tmp_path / "shallow"
    shutil.copytree(pebble_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (folder / BUDGETS_FILE).unlink()
    return str(folder)


@pytest.mark.parametrize("by", ["loss", "attention", "error"])
def test_texts_become_a_table_of_the_models_shape(
    tmp_path: Path, texts: list[str], by: str, shallow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layers = (shallow, 2) if by == "loss" else ("pebble", LAYERS)
    monkeypatch.setattr(calibrate, "FEWEST_TOKENS", 440)
    # From the first token on, or the fold is so short that a head wins nothing.
    short = replace(FOLD_PROFILES["pebble"], keep_first_tokens=0, max_segment_tokens=256)
    monkeypatch.setitem(FOLD_PROFILES, "pebble", short)
    out = tmp_path / "table.json"
    words = ["calibrate", "--model", model, "--profile", "pebble", "--by", by, "--texts", texts[0]]
    words += ["--max-tokens", "440", "--out", str(out)]
    assert main(words) == 0
    first = out.read_text()
    found = json.loads(first)
    assert found["model"] == Path(model).name and found["folds"] == 1 and found["by"] == by
    assert found["calibrated_on"] == "1 texts, 440 tokens of each at most"
    assert found["conclusion"] == 16, "Pebble thinks"
    assert min(map(min, found["weights"])) > 0 or by == "error", "no head's need is nothing"
    counts = FoldBudgets.load(out, layers, HEADS).counts(32, 512, 16)
    assert min(counts) >= 16 and sum(counts) == 32 * layers * HEADS and len(set(counts)) > 1
    if by == "attention":  # the other way takes as long again as all of this
        assert main(words) == 0
        assert out.read_text() == first


def test_answers_are_cut_as_the_engine_cuts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []

    async def canned(config: EngineConfig, questions: list[str], max_tokens: int) -> list[traces.Trace]:
        assert config.fold_policy == "off" and max_tokens == 2048
        prompts.extend(questions)
        language = load_language(config)
        tokenizer, markers = language.tokenizer, language.markers
        assert markers is not None
        body = tokenizer.encode(markers.start + "".join(f"{i} + 1\n" + "\n" * (i % 20 == 19) for i in range(300)))
        prompt: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": questions[0]}], add_generation_prompt=True, return_dict=False
        )
        return [traces.Trace(list(prompt), body[:900])]

    monkeypatch.setattr(traces, "write_traces", canned)
    out, kept = tmp_path / BUDGETS_FILE, tmp_path / "traces.jsonl"
    words = ["calibrate", "--suite", "medium", "-n", "1", "--max-tokens", "2048", "--traces", str(kept)]
    words += ["--out", str(out), "--by", "attention"]
    assert main([*words, "--offset", "77"]) == 0
    assert len(prompts) == 1
    first = out.read_text()
    found = json.loads(first)
    assert found["calibrated_on"] == "1 answers to medium from problem 77 on, 2048 tokens of each at most"
    assert found["folds"] >= 3 and found["by"] == "attention"
    assert main([*words, "--offset", "77"]) == 0
    assert len(prompts) == 1 and out.read_text() == first, "what was recorded is not written again"
    assert main([*words, "--offset", "78"]) == 2, "the recorded answers are to another problem"
    assert main([*words, "--offset", "77", "-n", "2"]) == 2


def test_by_loss_is_the_relief_with_a_little_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(model="pebble", device="cpu", dtype="auto", conclusion=16, by="loss")
    counts = [[float(layer + head) for head in range(HEADS)] for layer in range(LAYERS)]  # mean 4
    relief, mass = torch.zeros(LAYERS, HEADS), torch.zeros(LAYERS, HEADS, dtype=torch.bool)
    relief[3, 1] = 0.02
    text = sensitivity.Text([], [Span(0, 16, 20)] * 7, Entries(*torch.zeros(3, 1)))
    asked: list[int] = []

    def searched(model: object, texts: list[object], conclusion: int) -> sensitivity.Needs:
        assert texts == [text]
        asked.append(conclusion)
        return sensitivity.Needs(relief, mass, 100)

    monkeypatch.setattr(calibrate, "survey", lambda *_: (counts, [text]))
    monkeypatch.setattr(sensitivity, "search", searched)
    table = calibrate.weigh(args, [], 32)
    assert asked == [16] and table.folds == 7 and table.mass == []
    weights = table.weights
    assert weights[3][1] == pytest.approx(0.95 * 16 + 0.05 * 1) and weights[7][1] == pytest.approx(0.05 * 2)
    assert weights[0][0] == 0.0, "neither loss nor attention asks for anything"
    mass[1, 0] = True
    assert calibrate.weigh(args, [], 32).mass == [[0, 0], [1, 0], *[[0, 0]] * 6]
    args.by = "attention"
    assert calibrate.weigh(args, [], 32) == calibrate.Table(counts, 7)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["-n", "0"], "n"),
        (["--offset", "-1"], "offset"),
        (["--entries", "128"], "entries"),
        (["--conclusion", "32"], "conclusion"),
        (["--max-tokens", "1000"], "max_tokens"),
        (["--texts", "none.txt"], "texts"),
        (["--texts", "none.txt", "--traces", "none.jsonl"], "traces"),
        (["--entries", "16"], "conclusion"),
    ],
)
def test_impossible_options_are_refused_by_name(
    tmp_path: Path, words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *words, "--out", str(tmp_path / "table.json")]) == 2
    assert f"thinkfold calibrate: {field}:" in capsys.readouterr().err


def test_a_short_text_and_a_missing_folder_are_refused(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(texts[0]).write_text("1 + 1\n")
    assert main(["calibrate", "--texts", texts[0], "--out", str(tmp_path / "table.json")]) == 2
    assert "one.txt has" in capsys.readouterr().err
    assert main(["calibrate", "--texts", texts[1], "--out", str(tmp_path / "nowhere" / "table.json")]) == 2
    assert "out: there is no folder" in capsys.readouterr().err


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    wrote = [traces.Trace([1, 2], [3]), traces.Trace([4], [5, 6])]
    traces.save(path, wrote)
    assert traces.load(path) == wrote
    path.write_text('{"prompt": [1]}\n')
    with pytest.raises(ParameterError, match=r"traces: cannot read traces\.jsonl"):
        traces.load(path)


def test_cuts_find_segments_and_the_answer() -> None:
    language = load_language(EngineConfig(model="pebble"))
    assert language.family is not None and language.markers is not None
    thinking = language.tokenizer.encode("1 + 2 = 3\n" * 40 + "\n" + "4 + 5 = 9\n" * 40)
    answer = language.tokenizer.encode(language.markers.end + "\n\n12")
    prompt = language.tokenizer.encode(language.markers.start)
    ends, answer_start = traces.cuts(language.family, traces.Trace(prompt, thinking + answer), FOLD_PROFILES["pebble"])
    assert len(ends) >= 2 and ends[-1] == len(thinking)
    assert answer_start == len(thinking) + 1


def test_written_traces_are_the_engines_greedy_answers() -> None:
    config = EngineConfig(model="pebble", fold_policy="off", kv_cache_bytes=1 << 26, max_num_seqs=2)
    found = asyncio.run(traces.write_traces(config, ["What is 2 + 3?", "What is 4 + 4?"], 12))
    assert [len(trace.output) for trace in found] == [12, 12]
    assert found[0].prompt != found[1].prompt
    assert asyncio.run(traces.write_traces(config, ["What is 4 + 4?"], 12)) == found[1:]


def tiny(window: int | None) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention" if window else "full_attention"],
    )
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
def test_a_recorded_model_says_what_it_says(window: int | None) -> None:
    model, ids = tiny(window), torch.randint(0, 32, (1, 24), generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation("eager")
    wanted = model(ids, use_cache=False).logits
    tape = use_tape(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, atol=1e-4, rtol=1e-4)
    tape.take()
    record = read(model, tape, ids[0].tolist())
    assert record.queries.shape == (2, 2, 2, 24, 8) and record.keys.shape == record.values.shape == (2, 2, 24, 8)
    assert record.scale == 8**-0.5
    if window is None:  # the tokens after the first 10, with those as memory
        tape.memory = [
            Entries(k[:, :10], v[:, :10], torch.zeros(2, 10)) for k, v in zip(record.keys, record.values, strict=True)
        ]
        rest = model(ids[:, 10:], position_ids=torch.arange(10, 24)[None], use_cache=False).logits
        torch.testing.assert_close(rest, wanted[:, 10:], atol=1e-4, rtol=1e-4)


def test_pebble_ships_with_its_table() -> None:
    budgets = FoldBudgets.load(pebble_path() / BUDGETS_FILE, LAYERS, HEADS)
    assert budgets.calibrated
    entries = FOLD_PROFILES["pebble"].entries
    counts = budgets.counts(entries, 320, 16)
    assert sum(counts) == entries * LAYERS * HEADS
    assert counts[3 * HEADS + 1] > 192 and min(counts) == 16, "one head alone looks results up; all keep conclusions"
    assert calibrate.OFFSET > 100_000
