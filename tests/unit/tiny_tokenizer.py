"""A small byte-level tokenizer with ChatML templates, built in memory, for tests of text and server."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CORPUS = (
    "the answer to this sum is seven, and the user asked a question about the system",
    "system user assistant wait, let me check the answer again\n\n  x = y = 7  \r\n",
)

# Strips earlier thinking, opens nothing; enable_thinking=false closes thinking at once (Qwen3's way).
QWEN_TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- if m.reasoning_content is defined and keep_reasoning %}{{- m.reasoning_content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
OPEN_TEMPLATE = QWEN_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
)
KEEPING_TEMPLATE = QWEN_TEMPLATE.replace(
    "'<|im_start|>assistant\\n' + m.content",
    "'<|im_start|>assistant\\n' + ('<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' "
    "if m.reasoning_content is defined else '') + m.content",
)
PLAIN_TEMPLATE = QWEN_TEMPLATE.replace("enable_thinking is defined and enable_thinking is false", "false")
TOOL_TEMPLATE = QWEN_TEMPLATE.replace(
    "{%- for m in messages %}",
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}"
    "{{- 'name, arguments\\n' }}{{- '<|im_end|>\\n' }}{%- endif %}\n{%- for m in messages %}",
).replace(
    "m.content + '<|im_end|>\\n' }}\n{%- elif m.role == 'tool'",
    "m.content }}{%- for c in m.tool_calls %}{{- '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}\n{%- elif m.role == 'tool'",
)
EFFORT_TEMPLATE = QWEN_TEMPLATE.replace(
    "{%- for m in messages %}",
    "{%- if reasoning_effort %}{{- '<|im_start|>system\\nReasoning: ' + reasoning_effort + '<|im_end|>\\n' }}"
    "{%- endif %}\n{%- for m in messages %}",
)
RAISING_TEMPLATE = "{{ raise_exception('roles must alternate') }}"


def build_tokenizer(template: str | None = QWEN_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 340 entries."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer
