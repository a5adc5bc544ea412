"""Trains and writes Pebble's tokenizer, chat template and configs; and a fast encoder for training.

`python -m training.tokenizer` writes them to the model folder.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from thinkfold.pebble import pebble_path
from thinkfold.pebble.tasks import generate
from training.chat import GREETINGS, outside
from training.mixture import STAGES, draw
from training.traces import BLANK_LINE, SEGMENT_TOKEN, UNLEARNED, write

VOCABULARY = 1536
MAX_LENGTH = 16384
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", SEGMENT_TOKEN)
THINK = ("<think>", "</think>")
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII_PIECES = re.compile(
    PIECES.replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
    .replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
    .replace(r"\p{L}", "[A-Za-z]")
    .replace(r"\p{N}", "[0-9]")
)
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


def corpus(samples: int) -> Iterator[str]:
    """Questions and traces of all families, chat lines, and ordinary English of Python's own manual."""
    rng = Random(0)
    for k in range(samples):
        task, size = draw(k % len(STAGES), rng)
        problem = generate(task, rng, **size)
        trace = write(problem, rng)
        yield problem.question
        yield trace.thinking().replace(UNLEARNED, "").replace(SEGMENT_TOKEN, BLANK_LINE)
        yield f"The answer is \\boxed{{{trace.answer}}}."
        if k % 4 == 0:
            yield from outside(rng)
            yield from GREETINGS
    text = "\n".join(topics[name] for name in sorted(topics))
    yield from (part for part in text.split("\n\n") for _ in range(3))


def train(samples: int = 1500) -> Tokenizer:
    """A byte-level BPE with single digits and Qwen2's pieces; no normaliser, so every text returns unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(THINK),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(samples), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINK])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} entries, not {VOCABULARY}")
    return tokenizer


def _configs(tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    ids = {text: tokenizer.token_to_id(text) for text in (*SPECIAL, *THINK)}
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    added = {
        str(number): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text, number in ids.items()
    }
    model = {**MODEL_CONFIG, "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    generation = {"do_sample": True, "temperature": 0.7, "eos_token_id": [end, pad], "pad_token_id": pad}
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", SEGMENT_TOKEN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text(),
    }
    return {"config.json": model, "generation_config.json": generation, "tokenizer_config.json": tokens}


def write_folder(folder: Path) -> None:
    """Write tokenizer and configs into a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in _configs(tokenizer).items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class FastEncoder:
    """Encodes by a table of pieces; equal to the tokenizer (a test holds that), several times faster."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}
        self._special = {text: tokenizer.token_to_id(text) for text in (*SPECIAL, *THINK)}
        self._split = re.compile("(" + "|".join(re.escape(text) for text in self._special) + ")")

    def encode(self, text: str) -> list[int]:
        """Ids of a text that may hold special tokens."""
        if not text.isascii():
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for part in self._split.split(text):
            number = self._special.get(part)
            if number is not None:
                ids.append(number)
                continue
            for piece in ASCII_PIECES.findall(part):
                ids.extend(self._known.get(piece) or self._learn(piece))
        return ids

    def _learn(self, piece: str) -> tuple[int, ...]:
        ids = tuple(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        if len(self._known) < 200_000:
            self._known[piece] = ids
        return ids


def main() -> None:
    """Write the model folder's tokenizer and configs."""
    write_folder(pebble_path())


if __name__ == "__main__":
    main()
