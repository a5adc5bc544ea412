"""Six families on tokenizers made here: no hub is asked for theirs.

Each has the family's documented special tokens, a byte-level vocabulary instead of its own, and the parts of its chat
template that decide: what opens and switches off thinking, and how an answer ends. `written` is a reply as the model
writes it. So markers, start states, forced ends and both ways to a client are those of the family; its words are not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from branch_script import Kit, byte_tokenizer, run, seen
from scripted import ScriptRunner
from server_stand_in import events, join

from thinkfold.config import EngineConfig
from thinkfold.control.parts import PartControl
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.core import EngineCore
from thinkfold.engine.language import load_language
from thinkfold.engine.messages import ModelInfo
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.server.app import build_app
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import FinishReason, Phase, PromptState


@dataclass(frozen=True)
class Case:
    """`model_type` of a config that transformers knows; the family is found by the template, unless it needs both."""

    name: str
    specials: tuple[str, ...]  # the second one ends a response
    template: str
    opens: str  # with which its template ends when thinking is on; the model writes the start where it has none
    closed: str  # and when it is off
    written: str
    forced: str
    model_type: str = "qwen3"
    added: tuple[str, ...] = ()


KIMI_K3 = """\
{%- macro open_tag(tag, attrs='') -%}{{- '<|open|>' + tag + attrs + '<|sep|>' -}}{%- endmacro -%}
{%- macro close_tag(tag) -%}{{- '<|close|>' + tag + '<|sep|>' -}}{%- endmacro -%}
{%- for m in messages -%}
{{- open_tag('message', ' role="' + m.role + '"') + m.content + close_tag('message') + '<|end_of_msg|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- open_tag('message', ' role="assistant"') + open_tag('think' if thinking | default(true) else 'response') -}}
{%- endif -%}"""
GEMMA_4 = """\
{%- if enable_thinking | default(false) -%}{{- '<|turn>system\\n<|think|>\\n<turn|>\\n' -}}{%- endif -%}
{%- for m in messages -%}{{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}
{%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}
{%- endif -%}"""
COMMAND_A = """\
{%- for m in messages -%}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}
{{- '<|START_THINKING|><|END_THINKING|>' if enable_thinking is defined and not enable_thinking -}}
{%- endif -%}"""
APERTUS = """\
{%- set inner_token = '<|inner_prefix|>' -%}{%- set outer_token = '<|inner_suffix|>' -%}
{{- '<|developer_start|>Deliberation: ' + ('enabled' if enable_thinking else 'disabled') + '<|developer_end|>' -}}
{%- for m in messages -%}{{- '<|user_start|>' + m.content + '<|user_end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}"""
INKLING = """\
{%- for m in messages -%}{{- '<|message_user|><|content_text|>' + m.content + '<|end_message|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|message_model|>' -}}
{{- '<|content_text|>' if enable_thinking is defined and not enable_thinking -}}{%- endif -%}
{#- a reply is <|content_thinking|>...<|end_message|><|message_model|><|content_text|>... -#}"""
HUNYUAN = """\
{%- for m in messages -%}{{- m.content.split('<answer>')[-1] + '<|extra_0|>' -}}{%- endfor -%}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n<answer>\\n' -}}
{%- endif -%}"""

CASES = [
    Case(
        "kimi_k3",
        ("<|open|>", "<|end_of_msg|>", "<|close|>", "<|sep|>"),
        KIMI_K3,
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
        "w<|close|>think<|sep|><|open|>response<|sep|>A<|close|>response<|sep|><|close|>message<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    Case(
        "gemma_4",
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
        GEMMA_4,
        "<|turn>model\n",
        "<|turn>model\n<|channel>thought\n<channel|>",
        "<|channel>thought\nw<channel|>A",
        "<channel|>",
    ),
    Case(
        "command_a",
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        COMMAND_A,
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
        "<|START_THINKING|>w<|END_THINKING|><|START_TEXT|>A<|END_TEXT|>",
        "<|END_THINKING|>",
        added=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>"),
    ),
    Case(
        "apertus",
        ("<|assistant_start|>", "<|assistant_end|>", "<|inner_prefix|>", "<|inner_suffix|>", "<|user_start|>"),
        APERTUS,
        "<|assistant_start|>",
        "<|assistant_start|>",
        "<|inner_prefix|>w<|inner_suffix|>A",
        "<|inner_suffix|>",
    ),
    Case(
        "inkling",
        (
            "<|message_user|>",
            "<|content_model_end_sampling|>",
            "<|message_model|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|end_message|>",
        ),
        INKLING,
        "<|message_model|>",
        "<|message_model|><|content_text|>",
        "<|content_thinking|>w<|end_message|><|message_model|><|content_text|>A<|end_message|>",
        "<|end_message|><|message_model|><|content_text|>",
    ),
    Case(
        "hunyuan",
        ("<|extra_0|>", "<|eos|>"),
        HUNYUAN,
        "<|extra_0|>",
        "<|extra_0|><think>\n\n</think>\n<answer>\n",
        "<think>\nw\n</think>\n<answer>\nA\n</answer>",
        "\n</think>\n<answer>\n",
        model_type="hunyuan_v1_dense",
    ),
]
MESSAGE = {
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "q"}],
    "thinking": {"type": "adaptive"},
}
EACH = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def kit_of(case: Case) -> Kit:
    return Kit(specials=case.specials, added=case.added, template=case.template, model_type=case.model_type)


def names(kit: Kit, text: str) -> list[bytes]:
    """A text's tokens by name."""
    return [kit.vocabulary.token_bytes(i) for i in kit.tokenizer.encode(text, add_special_tokens=False)]


def started(kit: Kit, *, thinking: bool) -> tuple[str, PromptState]:
    """A chat's prompt and where a reply to it stands."""
    renderer = PromptRenderer(kit.tokenizer, normalize=True)
    ids = renderer.encode_chat([{"role": "user", "content": "q"}], enable_thinking=thinking)
    return renderer.decode(ids), kit.family.prompt_state(ids)


@EACH
def test_a_reply_is_parted_as_its_prompt_began_it(case: Case) -> None:
    kit = kit_of(case)
    assert kit.family.name == case.name
    prompt, state = started(kit, thinking=True)
    assert prompt.endswith(case.opens)
    assert (state.phase is Phase.THINKING) is ("think<|sep|>" in case.opens)
    output = run(kit, [*names(kit, case.written), "EOS"], state)
    assert (output.reasoning.strip(), output.text.strip(), output.finish_reason) == ("w", "A", FinishReason.STOP)
    assert output.thinking_end_reason == "natural"


@EACH
def test_switched_off_its_prompt_stands_in_the_answer(case: Case) -> None:
    kit = kit_of(case)
    prompt, state = started(kit, thinking=False)
    assert prompt.endswith(case.closed) and state.phase is Phase.ANSWER
    assert seen(run(kit, ["A", "EOS"], state, enabled=False, budget=0))[:2] == ("", "A")


@EACH
@pytest.mark.parametrize("budget", [1, 7])
def test_a_spent_budget_ends_thinking_as_the_family_does(case: Case, budget: int) -> None:
    kit = kit_of(case)
    assert kit.vocabulary.text(kit.family.force_ids) == case.forced
    _, state = started(kit, thinking=True)
    start = names(kit, case.written.partition("w")[0])
    words = budget - (case.name == "hunyuan")  # the newline behind its start is text, so it is thinking
    output = run(kit, [*start, *("w" for _ in range(words)), "A", "EOS"], state, budget=budget)
    told = kit.vocabulary.text(output.token_ids)
    assert told.partition(case.forced)[0].endswith("w" * words)
    assert (output.reasoning, output.text) == ("w" * words, "A"), "nothing of the forced end is thinking or answer"
    assert (output.num_thinking_tokens, output.thinking_end_reason) == (budget, "budget")


@asynccontextmanager
async def served(case: Case, folder: Path, budget: int | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the whole server in front of a core whose model writes the case's reply, or thinks for ever."""
    tokenizer = byte_tokenizer(specials=case.specials, added=case.added, template=case.template)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": case.model_type}))
    start = case.written.partition("w")[0]
    text = case.written if budget is None else start + "w" * 99
    eos = tokenizer.eos_token_id
    reply = [*tokenizer.encode(text, add_special_tokens=False), eos]
    answer = [*tokenizer.encode("A"), eos]

    def token_of(sample: Any, context: list[int], prompt_len: int) -> int:
        output, close = context[prompt_len:], tokenizer.encode(case.forced, add_special_tokens=False)
        ends = [i + len(close) for i in range(len(output)) if output[i : i + len(close)] == close]
        if budget is not None and ends:
            return answer[min(len(output) - ends[0], 1)]
        return reply[min(len(output), len(reply) - 1)]

    config = EngineConfig(str(folder), served_model_name=case.name, own_process=False)
    app = build_app(start=lambda: AsyncEngine.start(config, build=partial(build, token_of)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        await app.state.thinkfold.slot.loaded()
        yield client


def build(token_of: Callable[..., int], config: EngineConfig) -> tuple[EngineCore, ModelInfo]:
    """A real core whose runner draws what `token_of` says."""
    language = load_language(config)
    runner = ScriptRunner()
    lengths: dict[int, int] = {}

    def control(request: Any, branch: int) -> PartControl:
        lengths[request.sampling.seed] = len(request.prompt_token_ids)
        return PartControl(request, branch, language.vocabulary, language.family)

    runner.draw = lambda sample, context: token_of(sample, context, lengths[sample.seed])
    scheduler = Scheduler(KVManager(200, 4, enable_prefix_caching=True), max_num_seqs=4, max_num_batched_tokens=64)
    size, family = len(language.tokenizer), language.family
    info = ModelInfo(config.model, "x", 700, size, 200, 4, 100, 700, family.name, True, bool(family.force_ids))
    return EngineCore(runner, scheduler, control, page_bytes=100), info


@EACH
async def test_over_http_whole_and_streamed(case: Case, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 300, "enable_thinking": True}
    async with served(case, tmp_path) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        chunks = events(await client.post("/v1/chat/completions", json={**body, "stream": True}))
        blocks = (await client.post("/v1/messages", json={**MESSAGE, "model": case.name})).json()["content"]
        model = (await client.get("/v1/models")).json()["data"][0]["thinkfold"]
    told = whole["message"]["reasoning"].strip(), whole["message"]["content"].strip(), whole["thinking_end_reason"]
    assert told == ("w", "A", "natural")
    streamed = join(chunks)[0]
    assert (streamed.reasoning.strip(), streamed.content.strip()) == ("w", "A")
    assert model["family"] == case.name and model["budget_enforced"] is True, model
    assert [(block["type"], block[block["type"]].strip()) for block in blocks] == [("thinking", "w"), ("text", "A")]


@EACH
async def test_over_http_a_budget_ends_it(case: Case, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "thinking_token_budget": 5}
    async with served(case, tmp_path, budget=5) as client:
        reply = (await client.post("/v1/chat/completions", json={**body, "max_tokens": 200})).json()
    choice = reply["choices"][0]
    assert choice["message"]["reasoning"] == "w" * (4 if case.name == "hunyuan" else 5)
    assert (choice["message"]["content"], choice["thinking_end_reason"]) == ("A", "budget")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
