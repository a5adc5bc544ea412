"""Which replica has read which beginnings of prompts. Keeps salted hashes, and a bounded number of them.

A prompt is known by the hashes of its beginnings of whole blocks, each made from the one before. The salt is
drawn at start and never leaves the process, so that neither a dump nor a collision tells what somebody wrote.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from thinkfold.deploy.fleet.recent import Recent

BLOCK = 16  # tokens
MOST_BLOCKS = 262_144
Path = Sequence[bytes]


@dataclass(slots=True)
class _Beginning:
    """Who has read it, and who read a prompt last that ended just here."""

    readers: set[str] = field(default_factory=set)
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """`tokens` of a prompt that each replica has read; `before` ran what the prompt goes on from, if it is known."""

    tokens: dict[str, int]
    before: str | None


class KnownPrefixes:
    """`most` bounds the blocks; those not used for longest are forgotten, the ends of long prompts first."""

    def __init__(self, most: int = MOST_BLOCKS, salt: bytes | None = None) -> None:
        self._salt = secrets.token_bytes(32) if salt is None else salt
        self._known: Recent[bytes, _Beginning] = Recent(most)

    def __len__(self) -> int:
        return len(self._known)

    def path(self, namespace: tuple[str, ...], ids: Sequence[int]) -> Path:
        """Names of a prompt's beginnings of whole blocks, short ones first."""
        return list(self._names(namespace, ids))

    def record(self, path: Path, reader: str) -> None:
        """`reader` computes this prompt, or what a next one will begin with."""
        for depth, name in reversed(list(enumerate(path))):  # the beginning is used last, so it is forgotten last
            beginning = self._known.get(name) or _Beginning()
            beginning.readers.add(reader)
            if depth == len(path) - 1:
                beginning.ended = reader
            self._known.put(name, beginning)

    def find(self, path: Path) -> Found:
        """What is known of a prompt's beginnings.

        A prompt that begins with the whole of an earlier one goes on with its conversation; one that only shares
        a system prompt with others does not.
        """
        tokens: dict[str, int] = {}
        before: str | None = None
        for depth, name in enumerate(path, 1):
            beginning = self._known.get(name)
            if beginning is None:
                break
            tokens |= dict.fromkeys(beginning.readers, depth * BLOCK)
            before = beginning.ended or before
        return Found(tokens, before)

    def forget_reader(self, reader: str) -> None:
        """A replica has gone, and what it had read with it."""

        def emptied(_: bytes, beginning: _Beginning) -> bool:
            beginning.readers.discard(reader)
            if beginning.ended == reader:
                beginning.ended = None
            return not beginning.readers

        self._known.drop_where(emptied)

    def _names(self, namespace: tuple[str, ...], ids: Sequence[int]) -> Iterator[bytes]:
        chain = blake2b(repr(namespace).encode(), key=self._salt, digest_size=16)
        whole = array("q", ids[: len(ids) // BLOCK * BLOCK])
        for start, end in pairwise(range(0, len(whole) + 1, BLOCK)):
            chain.update(whole[start:end].tobytes())
            yield chain.digest()
