"""Pebble's tokenizer and chat template, and the encoder and template that training uses instead."""

from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from thinkfold.pebble import pebble_path
from training.chat import outside
from training.data import TextSource
from training.samples import Template, sample
from training.tokenizer import FastEncoder
from training.traces import UNLEARNED

USER = {"role": "user", "content": "What is 2 * 3?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pebble_path())


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and 12345 digits",
        "emoji 🎉👩‍👩‍👧 and flags 🇩🇪",
        "中文、日本語、한국어",
        "control \x00\x01\x07\x1b[0m text",
        "combining e\u0301 against é, and \u202eright to left\u202c",
        "  leading,   inner   and trailing blanks  ",
        "lines\r\n\r\nand\ttabs\n\n\n",
        "I'll don't WE'VE it's",
        "\ufeffbom \ufffd replacement \U0010ffff",
        "<|im_start|>user typed <think> markers</think><|segment|>",
        "",
    ],
)
def test_any_text_returns_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_random_unicode_returns_unchanged(tokenizer: Any) -> None:
    rng = Random(0)
    for _ in range(200):
        points = (
            rng.choice((rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))) for _ in "x" * 20
        )
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_markers_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer.encode("0123456789")) == 10
    for marker in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|segment|>", "<think>", "</think>"):
        assert len(tokenizer.encode(marker)) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode("<think>"), skip_special_tokens=True) == "<think>"
    assert tokenizer.decode(tokenizer.encode("a<|segment|>b"), skip_special_tokens=True) == "ab"


def test_template_with_and_without_thinking(tokenizer: Any) -> None:
    def prompt(**options: Any) -> str:
        return tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False, **options)

    begin = "<|im_start|>user\nWhat is 2 * 3?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt() == prompt(enable_thinking=True) == begin
    assert prompt(enable_thinking=False) == begin + "<think>\n\n</think>\n\n"


def test_template_strips_earlier_thinking(tokenizer: Any) -> None:
    for reply in (
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\nIt is 6."},
        {"role": "assistant", "content": "It is 6.", "reasoning_content": "long"},
    ):
        text = tokenizer.apply_chat_template([USER, reply, USER], add_generation_prompt=True, tokenize=False)
        assert text.count("It is 6.") == 1
        assert "long" not in text and "think" not in text


def test_template_keeps_thinking_after_the_last_question(tokenizer: Any) -> None:
    reply = {"role": "assistant", "content": "It is 6.", "reasoning_content": "short"}
    text = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, USER, reply], tokenize=False)
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n<think>\nshort\n</think>\n\nIt is 6.<|im_end|>\n")


def test_training_template_equals_transformers(tokenizer: Any) -> None:
    template = Template(pebble_path())
    system, reply = {"role": "system", "content": "S"}, {"role": "assistant", "content": "R"}
    for messages in ([USER], [system, USER], [system, USER, reply, USER]):
        for thinks in (True, False):
            assert template.prompt(messages, thinks) == tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinks
            )


def test_fast_encoder_equals_the_tokenizer(tokenizer: Any) -> None:
    encoder, template, rng = FastEncoder(tokenizer.backend_tokenizer), Template(pebble_path()), Random(4)
    texts = [text for _ in range(60) for text in outside(rng)]
    for stage in (0, 1):
        for _ in range(40):
            prompt, completion = sample(stage, rng, template)
            texts += [prompt, completion.replace(UNLEARNED, ""), prompt + completion.replace(UNLEARNED, "")]
    for text in texts:
        assert encoder.encode(text) == tokenizer.encode(text)


def test_marks_split_no_token(tokenizer: Any) -> None:
    source, template, rng = TextSource(pebble_path(), "marks"), Template(pebble_path()), Random(6)
    marked = 0
    for _ in range(150):
        prompt, completion = sample(0, rng, template)
        ids = source.encode(prompt, completion)
        assert (ids & 0x7FFF).tolist() == tokenizer.encode(prompt + completion.replace(UNLEARNED, ""))
        marked += UNLEARNED in completion
    assert marked
