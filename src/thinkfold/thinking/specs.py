"""The table of known thinking families, as text. Resolved against a tokenizer elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """Markers of one family as its template writes them.

    A spec applies if the chat template holds every string of `evidence` and one of its own
    start or end markers, and `model_types`, where given, begin the model's type. Where a
    template puts its markers together from parts, `signs` stand for them. The first spec
    that applies is taken. `force_tail` follows the forced end unless the template shows
    other newlines there.
    """

    name: str
    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    force: str = "</think>"
    force_tail: str = "\n\n"
    implicit_ends: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    delimiters: tuple[str, ...] = ("<|segment|>",)
    turns: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()


HARMONY_FINAL = "<|start|>assistant<|channel|>final<|message|>"

SPECS = (
    FamilySpec(
        "gpt_oss",
        starts=("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        ends=("<|end|>",),
        # Forcing the end alone lets the model open another analysis message.
        force="<|end|>" + HARMONY_FINAL,
        force_tail="",
        openers=(HARMONY_FINAL, "<|channel|>final<|message|>"),
        turns=("<|start|>",),
        evidence=("<|channel|>analysis",),
    ),
    FamilySpec(
        "kimi_k3",
        starts=("<|open|>think<|sep|>",),
        ends=("<|close|>think<|sep|>",),
        force="<|close|>think<|sep|><|open|>response<|sep|>",
        force_tail="",
        implicit_ends=("<|open|>tools<|sep|>",),
        openers=("<|open|>response<|sep|>",),
        closers=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        evidence=("<|close|>", "<|sep|>"),
        signs=("<|open|>",),
    ),
    FamilySpec("gemma_4", ("<|channel>thought\n",), ("<channel|>",), "<channel|>", ""),
    FamilySpec(
        "command_a",
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>",),
        force="<|END_THINKING|>",
        force_tail="",
        implicit_ends=("<|START_ACTION|>",),
        openers=("<|START_TEXT|>", "<|START_RESPONSE|>"),
        closers=("<|END_TEXT|>", "<|END_RESPONSE|>"),
    ),
    FamilySpec("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), "<|inner_suffix|>", ""),
    FamilySpec(
        "inkling",
        starts=("<|content_thinking|>",),
        ends=("<|end_message|>",),
        # As with gpt_oss: after the end alone the model may open another block of thinking.
        force="<|end_message|><|message_model|><|content_text|>",
        force_tail="",
        openers=("<|message_model|>", "<|content_text|>"),
        turns=("<|message_user|>", "<|message_system|>", "<|message_tool|>", "<|message_model|>"),
        evidence=("<|content_text|>",),
    ),
    FamilySpec("magistral", ("[THINK]",), ("[/THINK]",), "[/THINK]", ""),
    FamilySpec("seed_oss", ("<seed:think>",), ("</seed:think>",), "</seed:think>", ""),
    FamilySpec("minimax_m3", ("<mm:think>",), ("</mm:think>",), "</mm:think>"),
    FamilySpec("kimi_vl", ("◁think▷",), ("◁/think▷",), "◁/think▷"),
    FamilySpec("exaone_deep", ("<thought>",), ("</thought>",), "</thought>"),
    FamilySpec(
        "granite_3_2",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=tuple(
            before + words for before in ("\n\n", "") for words in ("Here is my response:", "Here's my response:")
        ),
        force="\n\nHere is my response:",
        force_tail="\n\n",
    ),
    FamilySpec(
        "granite_3_3",
        force="</think><response>",
        force_tail="",
        openers=("<response>",),
        closers=("</response>",),
        evidence=("<response>",),
        model_types=("granite",),
    ),
    FamilySpec(
        "hunyuan",
        # All of it is ordinary text; the newline is part of the end, or the forced one would count as thinking.
        ends=("\n</think>", "</think>"),
        force="\n</think>\n<answer>\n",
        force_tail="",
        openers=("<answer>",),
        closers=("</answer>",),
        evidence=("<answer>",),
        model_types=("hunyuan",),
    ),
    FamilySpec("ernie_4_5", openers=("<response>",), closers=("</response>",), model_types=("ernie",)),
    FamilySpec("glm", implicit_ends=("<tool_call>",), force_tail="\n", evidence=("[gMASK]",)),
    FamilySpec("kimi_k2", implicit_ends=("<|tool_calls_section_begin|>",), model_types=("kimi",)),
    FamilySpec("qwen3_5", implicit_ends=("<tool_call>",), model_types=("qwen3_5", "qwen3_6", "qwen3_8", "nemotron")),
    FamilySpec("hy3", implicit_ends=("<tool_calls>",), model_types=("hy_v3",)),
    FamilySpec("qwen_like", implicit_ends=("<tool_call>",), model_types=("step3", "mimo", "intern", "laguna")),
    FamilySpec("qwen3", model_types=("qwen3",)),
    FamilySpec("deepseek_r1", evidence=("<｜Assistant｜>",)),
    FamilySpec("qwq", evidence=("<|im_start|>",), model_types=("qwen2",)),
    FamilySpec("think"),
)
