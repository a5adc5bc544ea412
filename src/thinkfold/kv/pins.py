"""Pins: prefixes that stay in the prefix tree until their time is over, or memory is short. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from thinkfold.kv.pages import PagePool
from thinkfold.kv.radix import RadixCache


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A prefix in pages of the tree, held by its name for `owner` until `expires` (seconds; inf is for good).

    `weak` pins are made ahead of a turn that may never come: they go first. `session` is whose turn that is.
    """

    name: str
    owner: str
    pages: tuple[int, ...]
    expires: float
    weak: bool
    session: str = ""


class PinBoard:
    """All pins, the one to give up first in front. Several may hold the same page."""

    def __init__(self, pool: PagePool, radix: RadixCache) -> None:
        self._pool = pool
        self._radix = radix
        self._pins: dict[tuple[str, str], Pin] = {}  # by owner and name, the oldest first
        self._holders: Counter[int] = Counter()  # pins of each page
        self.revoked = 0

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def pages_of(self, owner: str) -> int:
        """Pages that the owner's pins hold."""
        return len({page for pin in self.of(owner) for page in pin.pages})

    def put(self, pin: Pin, limit: int) -> bool:
        """Pin pages that the tree holds. Of its owner's at most `limit` pages are pinned: older weak pins make room.

        It takes the place of one with its name, and of weak ones that it makes longer. False if it does not fit.
        """
        strong = [old for old in self.of(pin.owner) if not old.weak and old.name != pin.name]
        if len({page for old in (*strong, pin) for page in old.pages}) > limit:
            return False
        for old in self.of(pin.owner):
            covered = old.weak and pin.pages[: len(old.pages)] == old.pages
            if old.name == pin.name or covered:
                self.drop(old)
        self._hold(pin)
        for old in self.of(pin.owner):
            if self.pages_of(pin.owner) <= limit:
                break
            if old.weak and old is not pin:
                self.drop(old)
        return True

    def of(self, owner: str) -> list[Pin]:
        """The owner's pins, the oldest first."""
        return [pin for pin in self if pin.owner == owner]

    def drop(self, pin: Pin) -> None:
        """Let go of a pin; its pages are like any other of the tree."""
        del self._pins[pin.owner, pin.name]
        for page in reversed(pin.pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._pool.pin(page, False)
                self._radix.note_idle(page)

    def expire(self, now: float) -> bool:
        """Let go of the pins whose time is over; whether there were any."""
        late = [pin for pin in self if pin.expires <= now]
        for pin in late:
            self.drop(pin)
        return bool(late)

    def revoke(self, idle: int) -> None:
        """Memory is short: let pins go, weak ones first, until the tree has `idle` pages to evict or no pin is left."""
        for pin in sorted(self, key=lambda pin: not pin.weak):
            if self._pool.num_idle_cached >= idle:
                return
            self.drop(pin)
            self.revoked += 1

    def _hold(self, pin: Pin) -> None:
        self._pins[pin.owner, pin.name] = pin
        for page in pin.pages:
            if not self._holders[page]:
                self._pool.pin(page, True)
            self._holders[page] += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pool knows each pinned page, and no other."""
        held = Counter(page for pin in self._pins.values() for page in pin.pages)
        assert held == self._holders, "pages of pins are miscounted"
        marked = {page for page in range(self._pool.num_pages) if self._pool.pinned(page)}
        assert marked == set(held), "the pool disagrees about what is pinned"
