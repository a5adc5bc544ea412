"""Keeps control tokens that a user typed from becoming control tokens.

Knows one tokenizer and strings; knows nothing about chat templates or requests.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from tokenizers import Tokenizer


def is_control(content: str, special: bool) -> bool:
    """Whether an added token steers the model, unlike added words and runs of blanks."""
    if len(content) < 2 or content.isspace():
        return False
    return special or not (content[0].isalnum() or content[0].isspace() or content[-1].isalnum())


class ControlTokens:
    """Escapes typed control tokens, and encodes rendered text in which the real ones count.

    The text is encoded by a copy of the tokenizer whose control tokens are spelled with a
    secret, so that no text can contain them; everything else encodes as in the original.
    Thread-safe: nothing changes after construction.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        nonce = str(secrets.randbits(64))
        self._break = f"\ufdd0{nonce}\ufdd1"
        spec = json.loads(tokenizer.to_str())
        spec.update(truncation=None, padding=None, post_processor=None)
        vocabulary = _model_vocabulary(spec["model"])
        real_ids: dict[str, int] = {}
        self._spelling: dict[str, str] = {}
        self._leaks: set[int] = set()
        for index, token in enumerate(spec["added_tokens"]):
            content = token["content"]
            if is_control(content, token["special"]):
                token["content"] = self._spelling[content] = f"\ufdd2{nonce}.{index}\ufdd3"
                if content in vocabulary:
                    self._leaks.add(token["id"])
            real_ids[token["content"]] = token["id"]
        spec["added_tokens"].append({**_PLAIN_TOKEN, "id": tokenizer.get_vocab_size() + 1, "content": self._break})
        self._spelling = dict(sorted(self._spelling.items(), key=lambda item: -len(item[0])))
        self._copy = Tokenizer.from_str(json.dumps(spec))
        self._real_id = {self._copy.token_to_id(text): real for text, real in real_ids.items()}
        self._break_id = self._copy.token_to_id(self._break)

    @property
    def strings(self) -> tuple[str, ...]:
        """The control tokens' texts, longest first."""
        return tuple(self._spelling)

    def escape(self, text: str) -> str:
        """`text` with every control token broken after its first character."""
        for token in self._spelling:
            broken = token[0] + self._break + token[1:]
            while token in text:
                text = text.replace(token, broken)
        return text

    def encode(self, rendered: str) -> list[int]:
        """Ids of a text made of real control tokens and escaped content."""
        for token, spelling in self._spelling.items():
            rendered = rendered.replace(token, spelling)
        ids = self._copy.encode(rendered.replace(self._break, ""), add_special_tokens=False).ids
        if self._leaks and not self._leaks.isdisjoint(ids):
            # Some models know control tokens as ordinary pieces: split at the breaks instead.
            ids = [i for i in self._copy.encode(rendered, add_special_tokens=False).ids if i != self._break_id]
        return [self._real_id.get(i, i) for i in ids]


_PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _model_vocabulary(model: dict[str, Any]) -> set[str]:
    vocabulary = model["vocab"]
    return set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
