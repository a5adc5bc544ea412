"""A mapping that forgets: the entry that was not used for longest goes when there is one too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Holds at most `most` entries; `get` and `put` are uses."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def drop(self, key: Key) -> None:
        """Forget an entry; unknown ones are ignored."""
        self._entries.pop(key, None)

    def drop_where(self, gone: Callable[[Key, Value], bool]) -> None:
        """Forget all entries of which `gone` says so."""
        for key in [key for key, value in self._entries.items() if gone(key, value)]:
            del self._entries[key]
