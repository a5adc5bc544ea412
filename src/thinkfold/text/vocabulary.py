"""The bytes of every token of a loaded tokenizer. Knows nothing about models or requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinkfold.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METASPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token id to bytes, exact for every tokenizer it accepts.

    `special_ids` are never printed. `added_ids` holds every added token, special or not.
    Ids without a token (padding rows of an embedding) have no bytes.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    added_ids: frozenset[int] = frozenset()

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] = ()) -> Vocabulary:
        """Read a fast tokenizer; `eos_ids` are further end tokens (generation_config's).

        Raises UnsupportedError where tokens cannot be turned into bytes one by one.
        """
        to_bytes = _byte_reader(tokenizer)
        added = tokenizer.added_tokens_decoder
        by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        size = max((*by_id, *added), default=-1) + 1
        tokens = [b""] * size
        for token_id, token in by_id.items():
            if token_id not in added:
                tokens[token_id] = to_bytes(token)
        for token_id, token in added.items():
            tokens[token_id] = str(token.content).encode("utf-8", "surrogatepass")
        special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        own_eos = tokenizer.eos_token_id
        ends = set(eos_ids) | ({own_eos} if isinstance(own_eos, int) else set())
        return cls(tuple(tokens), frozenset(special), frozenset(ends), frozenset(added))

    @property
    def size(self) -> int:
        """One more than the largest token id."""
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for; empty for an id without a token."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else b""

    def text(self, token_ids: Iterable[int]) -> str:
        """All bytes of the tokens as text, special tokens included."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")


def _byte_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        raise _unsupported(tokenizer, "it has no token decoder")
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return _byte_level_reader()
    space = _space_mark(parts)
    if space is None or not set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise _unsupported(tokenizer, f"its decoder ({', '.join(kinds)}) does not work on bytes")
    return lambda token: _fallback_bytes(token, space)


def _unsupported(tokenizer: PreTrainedTokenizerBase, reason: str) -> UnsupportedError:
    return UnsupportedError(
        "model", f"the tokenizer {type(tokenizer).__name__} gives no bytes for its tokens: {reason}"
    )


def _space_mark(parts: list[Mapping[str, Any]]) -> str | None:
    for part in parts:
        if part["type"] == "Metaspace":
            return str(part["replacement"])
        if part["type"] == "Replace" and part["content"] == " ":
            return part["pattern"].get("String")
    return None


def _fallback_bytes(token: str, space: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass  # an ordinary token that only looks like a byte
    return token.replace(space, " ").encode("utf-8", "surrogatepass")


def _byte_level_reader() -> Callable[[str], bytes]:
    table = byte_level_table()

    def read(token: str) -> bytes:
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode("utf-8", "surrogatepass")

    return read


def byte_level_table() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}
