"""Small real tokenizers and a scripted driver: the Script and Loop of the bug log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from thinkfold.control.branch import BranchControl
from thinkfold.text.vocabulary import Vocabulary, byte_level_table
from thinkfold.thinking.families import Family, resolve_family
from thinkfold.types import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Phase,
    PromptState,
    SamplingParams,
    ThinkingPolicy,
)

TEMPLATE = "{{ '<|im_start|>assistant\\n' }}{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false }}"
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|segment|>")
MARKERS = ("<think>", "</think>", "<tool_call>")
BARE = PromptState(Phase.ANSWER, 0, 0)
OPEN = PromptState(Phase.THINKING, 0, 0)
TO_CHAR = {byte: char for char, byte in byte_level_table().items()}

Source = Callable[[list[int], int, bool], int]


def byte_tokenizer(
    entries: Sequence[str | bytes] = (),
    *,
    specials: Sequence[str] = SPECIALS,
    added: Sequence[str] = MARKERS,
    template: str | None = TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Byte-level: 256 bytes, the entries as further tokens (never merged), added tokens."""
    words = [e.encode() if isinstance(e, str) else e for e in entries]
    names = [*TO_CHAR.values(), *("".join(TO_CHAR[b] for b in word) for word in words if len(word) > 1)]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=specials[1])
    tokenizer.chat_template = template
    return tokenizer


class Kit:
    """A tokenizer with its vocabulary and family, and short names for tokens."""

    def __init__(self, entries: Sequence[str | bytes] = (), *, model_type: str = "qwen3", **options) -> None:
        markers = {name: options.pop(name, None) for name in ("start", "end", "force")}
        self.tokenizer = byte_tokenizer(entries, **options)
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        self.family: Family | None = resolve_family(self.tokenizer, self.vocabulary, model_type, **markers)
        self._ids = {self.vocabulary.token_bytes(i): i for i in range(self.vocabulary.size)}
        self.eos = self.tokenizer.eos_token_id

    def ids(self, script: str | Sequence[str | bytes]) -> list[int]:
        """Tokens by name; a string is split at `·`, EOS is the end token."""
        names = script.split("·") if isinstance(script, str) else script
        return [self.eos if n == "EOS" else self._ids[n.encode() if isinstance(n, str) else n] for n in names]

    def control(self, prompt: PromptState = OPEN, *, branch: int = 0, **options) -> BranchControl:
        own = {name: options.pop(name) for name in ("closing_ids", "min_segment_tokens") if name in options}
        thinking = ThinkingPolicy(
            options.pop("enabled", True),
            options.pop("budget", None),
            "default",
            eos_in_thinking=options.pop("eos_in_thinking", "close"),
        )
        options.setdefault("max_tokens", 1000)
        request = EngineRequest("r", (1,), prompt, SamplingParams(**options), thinking)
        return BranchControl(request, branch, self.vocabulary, self.family, **own)

    def script(self, script: str | Sequence[str | bytes]) -> Source:
        """The listed tokens; a banned end token gives way to `x`."""
        tokens = self.ids(script)
        filler = self.ids("x")[0]

        def source(history: list[int], sampled: int, ban_eos: bool) -> int:
            token = tokens[sampled]
            return filler if ban_eos and token == self.eos else token

        return source

    def loop(self, *, opened: bool = True) -> Source:
        """`a` while thinking is open; after the close `B·C·EOS`."""
        a, b, c, newline, start, end = self.ids(["a", "B", "C", "\n", "<think>", "</think>"])

        def source(history: list[int], sampled: int, ban_eos: bool) -> int:
            is_open, said = opened, 0
            for token in history:
                if token in (start, end):
                    is_open, said = token == start, 0
                elif not is_open and token != newline:
                    said += 1
            if is_open:
                return a
            return (b, c)[said] if said < 2 else (b if ban_eos else self.eos)

        return source


class Run:
    """Drives one control to its end as the engine does and keeps what it said."""

    def __init__(self, control: BranchControl, source: Source, *, depth: int = 0, width: int = 1) -> None:
        self.control, self.source, self.depth, self.width = control, source, depth, width
        self.tokens: list[int] = []
        self.flight: list[int] = []
        self.sampled = self.discarded = 0
        self.output = CompletionOutput(0)

    def step(self) -> bool:
        """One engine step; False once the branch has ended."""
        if not self.flight:
            self.tokens += self.control.injection()
        waits = False
        while self.control.finish_reason is None and len(self.flight) < max(self.depth + 1, self.width) and not waits:
            waits = self.width == 1 and self.control.must_wait(len(self.flight))
            if not waits:
                ban = self.control.ban_eos(len(self.flight))
                self.flight.append(self.source(self.tokens + self.flight, self.sampled + len(self.flight), ban))
        for _ in range(self.width):
            if self.flight and self.control.finish_reason is None:
                self._collect()
        news = self.control.take()
        if news is not None:
            self.output.merge(news)
        return self.control.finish_reason is None

    def _collect(self) -> None:
        token = self.flight.pop(0)
        verdict = self.control.accept(token)
        self.sampled += 1
        self.tokens += (verdict.token_id, *verdict.inject)
        assert verdict.finish is self.control.finish_reason
        if verdict.inject or verdict.finish or verdict.token_id != token:
            self.discarded += len(self.flight)
            self.flight.clear()

    def finish(self, limit: int = 5000) -> CompletionOutput:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("the branch did not end")
        assert self.output.token_ids == self.tokens
        assert self.output.num_output_tokens == len(self.tokens)
        return self.output


def run(
    kit: Kit, source: str | Sequence[str | bytes] | Source, prompt: PromptState = OPEN, **options
) -> CompletionOutput:
    """Run at pipeline depth 0 and 1, require equal results, return them."""
    chosen = source if callable(source) else kit.script([*_names(source), *["x"] * 60])
    first, second = (Run(kit.control(prompt, **options), chosen, depth=depth).finish() for depth in (0, 1))
    assert first == second
    return first


def _names(script: str | Sequence[str | bytes]) -> list[str | bytes]:
    return list(script.split("·")) if isinstance(script, str) else list(script)


def seen(output: CompletionOutput) -> tuple[str, str, FinishReason | None]:
    """R, C, FR."""
    return output.reasoning, output.text, output.finish_reason
