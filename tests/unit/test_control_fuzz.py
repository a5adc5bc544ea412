"""Random branches: pipeline depth and collect width change nothing, limits always hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from branch_script import BARE, OPEN, Kit, Run, run
from transformers import PreTrainedTokenizerFast

import thinkfold
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.families import resolve_family
from thinkfold.types import FinishReason, Phase, ThinkingEndReason

WORDS = ["a", "b", ".", "\n", "\n\n", "<", "</", "think", ">", b"\xf0\x9f", b"\x99\x82", "ab"]
PEBBLE = Path(thinkfold.__file__).parent / "pebble" / "model"


def kits() -> dict[str, Kit]:
    return {
        "tokens": Kit(WORDS),
        "text": Kit(WORDS, added=()),
        "implicit": Kit(WORDS, model_type="qwen3_5"),
        "sequence": Kit(WORDS, start="<think>ab", end="</think>ab", force="</think>ab\n"),
        "none": Kit(WORDS, template=None),
    }


def random_source(kit: Kit, seed: int):
    """A fake model: its token depends on the whole history and the seed."""
    markers = [m for m in ("<think>", "</think>", "<tool_call>", "<|segment|>") if m.encode() in kit.vocabulary.tokens]
    choices = [*kit.ids([*WORDS, *WORDS, *markers]), kit.eos]

    def source(history: list[int], sampled: int, ban_eos: bool) -> int:
        rng = random.Random(f"{seed} {history[-6:]} {len(history)}")
        token = rng.choice(choices)
        return choices[0] if ban_eos and token == kit.eos else token

    return source


def random_options(rng: random.Random, kit: Kit) -> dict:
    options = {
        "budget": rng.choice([None, 0, 1, 3, 10, 30]),
        "max_tokens": rng.choice([1, 2, 5, 20, 60]),
        "stop": rng.choice([(), ("ab",), ("a\n", "b"), ("think",)]),
        "stop_in_thinking": rng.random() < 0.2,
        "ignore_eos": rng.random() < 0.2,
        "eos_in_thinking": rng.choice(["close", "stop"]),
        "closing_ids": rng.choice([(), tuple(kit.ids("a·b"))]),
        "stop_token_ids": rng.choice([(), tuple(kit.ids(">"))]),
    }
    options["min_tokens"] = rng.choice([0, min(4, options["max_tokens"])])
    return options


@pytest.mark.parametrize("name", kits())
def test_case_16_random_branches(name):
    kit, rng = kits()[name], random.Random(7)
    for seed in range(150):
        options, prompt = random_options(rng, kit), rng.choice([BARE, OPEN] if kit.family else [BARE])
        source = random_source(kit, seed)
        results = []
        for depth, width in ((0, 1), (1, 1), (0, 4)):
            results.append(Run(kit.control(prompt, **options), source, depth=depth, width=width).finish())
        assert results[0] == results[1] == results[2], (seed, options)
        check(kit, results[0], options)


def check(kit: Kit, output, options: dict) -> None:
    budget = options["budget"]
    assert output.num_output_tokens <= options["max_tokens"]
    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert budget is None or output.num_thinking_tokens <= budget + 3
    assert 0 <= output.num_thinking_tokens <= output.num_output_tokens
    assert (output.thinking_end_reason is ThinkingEndReason.UNCLOSED) is (output.phase is Phase.THINKING)
    printed = output.reasoning + output.text
    printed.encode("utf-8")
    if kit.family and kit.family.tokens.ends and kit.family.name == "qwen3":
        assert "</think>" not in printed.replace("".join(("</", "think", ">")), "")
    last = 0
    for segment in output.segments:
        assert last <= segment.start < segment.end <= output.num_output_tokens
        last = segment.end
    if options["stop"] and not options["min_tokens"]:
        assert not any(stop in output.text for stop in options["stop"]) or output.reasoning


@pytest.mark.skipif(not (PEBBLE / "tokenizer.json").exists(), reason="Pebble's tokenizer is not built")
def test_pebble_is_a_thinking_model():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(PEBBLE)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    family = resolve_family(tokenizer, vocabulary, "qwen3")
    assert family is not None
    assert family.name == "qwen3"
    assert vocabulary.text(family.force_ids) == "</think>\n\n"
    assert family.delimiter_ids == {tokenizer.convert_tokens_to_ids("<|segment|>")}
    for text in ("12 × 7 = 84, naïve 思考 🙂\r\n", "\x00\x7f\u2028"):
        assert vocabulary.text(tokenizer.encode(text)) == text
    render = lambda **options: tokenizer.apply_chat_template(  # noqa: E731
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False, **options
    )
    assert family.prompt_state(render()).phase is Phase.ANSWER
    off = family.prompt_state(render(enable_thinking=False))
    assert (off.phase, off.visible_len < len(render(enable_thinking=False))) == (Phase.ANSWER, True)
    kit = Kit()
    kit.tokenizer, kit.vocabulary, kit.family, kit.eos = tokenizer, vocabulary, family, tokenizer.eos_token_id
    script = [*tokenizer.encode("<think>\n1 + 1 = 2.\n\nSo<|segment|> it is 2.\n</think>\n\nIt is 2."), kit.eos]
    output = run(kit, lambda history, sampled, ban: script[min(sampled, len(script) - 1)], BARE)
    assert (output.reasoning, output.text) == ("1 + 1 = 2.\n\nSo it is 2.", "It is 2.")
    assert len(output.segments) == 3
