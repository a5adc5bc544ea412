"""Families: found by the template, resolved by the tokenizer; start states of prompts."""

from __future__ import annotations

import pytest
from branch_script import MARKERS, SPECIALS, TEMPLATE, Kit, byte_tokenizer, run, seen

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.families import resolve_family
from thinkfold.types import FinishReason, Phase, PromptState

HARMONY_TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>"
GRANITE = "Here is my thought process: ... Here is my response: ..."


def harmony() -> Kit:
    specials = ("<|start|>", "<|return|>", "<|end|>", "<|channel|>", "<|message|>")
    return Kit(specials=specials, added=(), template=HARMONY_TEMPLATE, model_type="gpt_oss")


@pytest.mark.parametrize(
    ("template", "model_type", "added", "name"),
    [
        (TEMPLATE, "qwen3", MARKERS, "qwen3"),
        (TEMPLATE, "qwen3_moe", MARKERS, "qwen3"),
        (TEMPLATE, "qwen3_5", MARKERS, "qwen3_5"),
        (TEMPLATE, "qwen2", MARKERS, "qwq"),
        ("<｜Assistant｜> content.split('</think>')[-1]", "qwen2", MARKERS, "deepseek_r1"),
        ("[gMASK]<sop><think></think>", "glm4_moe", MARKERS, "glm"),
        ("[THINK]x[/THINK]", "mistral", ("[THINK]", "[/THINK]"), "magistral"),
        ("<seed:think>", "seed_oss", ("<seed:think>", "</seed:think>"), "seed_oss"),
        (GRANITE, "granite", (), "granite_3_2"),
        ("<think></think> and <response></response>", "granite", (), "granite_3_3"),
        ("<think>\\n</think>\\n<answer>\\n</answer>", "hunyuan_v1_moe", (), "hunyuan"),
        ("'<|open|>' + tag + '<|sep|>', '<|close|>'", "kimi_k3", ("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
        ("<|channel>thought\n<channel|>", "gemma4", ("<|channel>", "<channel|>"), "gemma_4"),
        ("<|START_THINKING|>", "cohere2", ("<|START_THINKING|>", "<|END_THINKING|>"), "command_a"),
        ("<|inner_prefix|>", "apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), "apertus"),
        (
            "<|message_model|><|content_text|> <|content_thinking|>",
            "inkling",
            ("<|content_thinking|>", "<|end_message|>", "<|message_model|>", "<|content_text|>"),
            "inkling",
        ),
        ("<think>", "hy_v3", (*MARKERS, "<tool_calls>"), "hy3"),
        ("<|im_start|><think>", "mimo", MARKERS, "qwen_like"),
        ("<|im_start|><think>", "step3p5", MARKERS, "qwen_like"),
        ("<think>", "laguna", MARKERS, "qwen_like"),
        ("say <think>", "llama", (), "think"),
    ],
)
def test_family_by_template(template, model_type, added, name):
    kit = Kit(template=template, model_type=model_type, added=added)
    assert kit.family is not None
    assert kit.family.name == name
    assert kit.family.force_ids
    assert bool(kit.family.tokens.ends) is bool(added)
    assert bool(kit.family.texts.ends) is not bool(added)


def test_case_6_vocabulary_alone_is_no_evidence():
    for template in (None, "<|im_start|>{{ content }}", {"default": "plain"}):
        assert Kit(template=template).family is None
    kit = Kit(template=None)
    output = run(kit, ["A", "<think>", "EOS"], PromptState(Phase.ANSWER, 0, 0))
    assert seen(output) == ("", "A<think>", FinishReason.STOP)
    assert output.num_thinking_tokens == 0
    assert output.thinking_end_reason is None


def test_case_6_switched_off():
    kit = Kit()
    closed = kit.family.prompt_state(kit.tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    output = run(kit, "A·EOS", closed, enabled=False, budget=0)
    assert seen(output) == ("", "A", FinishReason.STOP)
    assert output.num_thinking_tokens == 0
    assert output.thinking_end_reason is None


def test_force_carries_the_newlines_of_the_template():
    kit = Kit()
    assert kit.family.force_ids == tuple(kit.ids(["</think>", "\n", "\n"]))
    once = Kit(template=r"{{ '</think>\n' + content }}")
    assert once.family.force_ids == tuple(once.ids(["</think>", "\n"]))
    assert kit.family.end_token_id == kit.ids(["</think>"])[0]


@pytest.mark.parametrize(
    ("template", "model_type", "added", "written", "told"),
    [
        (
            "<think>\\n</think>\\n<answer>\\n</answer>",
            "hunyuan_v1_moe",
            (),
            "<think>\nw\n</think>\n<answer>\nA\n</answer>",
            ("w", "A\n"),
        ),
        (
            "'<|open|>' + tag + '<|sep|>', '<|close|>'",
            "kimi_k3",
            ("<|open|>", "<|close|>", "<|sep|>"),
            "<|open|>think<|sep|>w<|close|>think<|sep|><|open|>response<|sep|>A<|close|>response<|sep|>",
            ("w", "A"),
        ),
        (
            "<|channel>thought\n<channel|>",
            "gemma4",
            ("<|channel>", "<channel|>"),
            "<|channel>thought\nw<channel|>A",
            ("w", "A"),
        ),
        (
            "<|inner_prefix|>",
            "apertus",
            ("<|inner_prefix|>", "<|inner_suffix|>"),
            "<|inner_prefix|>w<|inner_suffix|>A<|inner_prefix|>v<|inner_suffix|>B",
            ("wv", "AB"),
        ),
    ],
)
def test_families_of_several_tokens_or_blocks(template, model_type, added, written, told):
    kit = Kit(template=template, model_type=model_type, added=added)
    script = [kit.vocabulary.token_bytes(token_id) for token_id in kit.tokenizer.encode(written)]
    output = run(kit, [*script, "EOS"], PromptState(Phase.ANSWER, 0, 0))
    assert seen(output) == (*told, FinishReason.STOP)


@pytest.mark.parametrize(
    ("model_type", "call"),
    [("hy_v3", "<tool_calls>"), ("mimo", "<tool_call>"), ("laguna", "<tool_call>"), ("llama", None)],
)
def test_a_tool_call_ends_thinking_where_the_family_writes_it_there(model_type, call):
    kit = Kit(template="<think>", model_type=model_type, added=(*MARKERS, "<tool_calls>"))
    output = run(kit, ["w", call or "<tool_call>", "A", "EOS"], eos_in_thinking="stop")
    assert seen(output)[:2] == (("w", f"{call}A") if call else ("w<tool_call>A", ""))


def test_own_markers():
    kit = Kit(template=None, start="«", end="»", force="»\n")
    assert kit.vocabulary.text(kit.family.force_ids) == "»\n"
    assert Kit(force="\n</think>\n").family.name == "qwen3"
    for options, error, field in (
        ({"start": "«"}, ParameterError, "think_end"),
        ({"end": "»", "start": ""}, ParameterError, "think_start"),
        ({"force": "x"}, UnsupportedError, "think_force"),
        ({"force": "enough.</think>"}, UnsupportedError, "think_force"),
        ({"force": "x", "template": None}, ParameterError, "think_force"),
    ):
        with pytest.raises(error) as caught:
            Kit(**options)
        assert caught.value.field == field


def test_a_force_that_does_not_close_is_dropped():
    tokenizer = byte_tokenizer(added=("<think>", "</think>"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    broken = type("Broken", (), {})()
    for name in ("chat_template", "convert_tokens_to_ids"):
        setattr(broken, name, getattr(tokenizer, name))
    broken.encode = lambda text, **_: [65]
    family = resolve_family(broken, vocabulary, "qwen3")
    assert family is not None and family.force_ids == ()


PREFIX = "<|im_start|>user\nhi </think> <think><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("tail", "phase", "prefilled", "hidden"),
    [
        ("", Phase.ANSWER, 0, 0),
        ("<think>", Phase.THINKING, 0, 1),
        ("<think>\n", Phase.THINKING, 0, 2),
        ("<think>\n\n", Phase.THINKING, 0, 3),
        ("<think>p", Phase.THINKING, 1, 2),
        ("<think>\npqr", Phase.THINKING, 3, 5),
        ("<think>p\n", Phase.THINKING, 2, 3),
        ("<think>p<|segment|>q", Phase.THINKING, 3, 4),
        ("<think>\n\n</think>\n\n", Phase.ANSWER, 0, 6),
        ("<think>p</think>", Phase.ANSWER, 0, 3),
        ("<think>p</think>ab", Phase.ANSWER, 0, 5),
        ("</think>", Phase.ANSWER, 0, 1),
        ("<think>p</think><think>", Phase.THINKING, 0, 4),
    ],
)
def test_case_4_start_state_from_the_tail(tail, phase, prefilled, hidden):
    kit = Kit()
    ids = kit.tokenizer.encode(PREFIX + tail, add_special_tokens=False)
    assert kit.family.prompt_state(ids) == PromptState(phase, prefilled, len(ids) - hidden)


def test_case_4_script_under_each_start():
    kit = Kit()
    state = lambda tail: kit.family.prompt_state(kit.tokenizer.encode(PREFIX + tail, add_special_tokens=False))  # noqa: E731
    close = ["w", "</think>", "A", "EOS"]
    assert seen(run(kit, close, state("<think>\n")))[:2] == ("w", "A")
    assert seen(run(kit, ["<think>", *close], state("")))[:2] == ("w", "A")
    assert seen(run(kit, ["w", "A", "EOS"], state("<think>p</think>")))[:2] == ("", "wA")
    assert seen(run(kit, close, state("<think>p")))[:2] == ("w", "A")


def test_case_5_history_never_decides():
    kit = Kit()
    history = "<|im_start|>assistant\n<think>old</think>x<|im_end|>\n<|im_start|>user\n</think><|im_end|>\n"
    ids = kit.tokenizer.encode(history + "<|im_start|>assistant\n", add_special_tokens=False)
    state = kit.family.prompt_state(ids)
    assert state == PromptState(Phase.ANSWER, 0, len(ids))
    assert seen(run(kit, ["<think>", "w", "</think>", "A", "EOS"], state))[:2] == ("w", "A")


def test_case_5_only_the_tail_is_read():
    kit = Kit()
    tail = kit.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    class Watched(list):
        reads = 0

        def __getitem__(self, index):
            type(self).reads += 1
            return super().__getitem__(index)

    kit.family.prompt_state(Watched([5] * 100_000 + tail))
    assert Watched.reads <= len(tail) + 2


def test_harmony_prompt_tails():
    kit = harmony()
    analysis = ["<|channel|>", *"analysis", "<|message|>"]
    history = ["<|start|>", *"assistant", *analysis, "o", "<|end|>", "<|start|>", *"assistant"]
    assert kit.family.prompt_state(kit.ids(history)).phase is Phase.ANSWER
    state = kit.family.prompt_state(kit.ids([*history, *analysis, "p"]))
    assert (state.phase, state.prefilled_thinking, state.visible_len) == (Phase.THINKING, 1, len(history))


def test_harmony_natural_and_forced():
    kit = harmony()
    analysis, final = ["<|channel|>", *"analysis", "<|message|>"], ["<|start|>", *"assistant", "<|channel|>", *"final"]
    bare = PromptState(Phase.ANSWER, 0, 0)
    again = ["<|start|>", *"assistant", *analysis]
    script = [*analysis, "w", "<|end|>", *again, "v", "<|end|>", *final, "<|message|>", "A", "EOS"]
    output = run(kit, script, bare)
    assert seen(output) == ("wv", "A", FinishReason.STOP)
    assert output.num_thinking_tokens == 2
    forced = run(kit, [*analysis, "w", "w", "A", "EOS"], bare, budget=2)
    assert seen(forced) == ("ww", "A", FinishReason.STOP)
    assert forced.token_ids[-2 - len(kit.family.force_ids) : -2] == kit.ids(["<|end|>", *final, "<|message|>"])
    direct = run(kit, ["<|channel|>", *"final", "<|message|>", "A", "EOS"], bare)
    assert seen(direct) == ("", "A", FinishReason.STOP)


def test_text_family_prompt_tails():
    kit = Kit(added=(), template="<think>", model_type="llama")
    encode = lambda text: kit.tokenizer.encode(PREFIX + text, add_special_tokens=False)  # noqa: E731
    assert kit.family.prompt_state(encode("")).phase is Phase.ANSWER
    state = kit.family.prompt_state(encode("<think>\nab"))
    assert (state.phase, state.prefilled_thinking) == (Phase.THINKING, 2)
    assert kit.family.prompt_state(encode("<think>a</think>")).phase is Phase.ANSWER


@pytest.mark.parametrize("tail", ["<｜Assistant｜><think>\n", "<|assistant|><think>"])
def test_turn_tokens_need_not_be_special(tail):
    kit = Kit(specials=SPECIALS, added=(*MARKERS, "<｜Assistant｜>", "<|assistant|>"))
    ids = kit.tokenizer.encode("<think></think>" + tail, add_special_tokens=False)
    assert kit.family.prompt_state(ids) == PromptState(Phase.THINKING, 0, 3)
