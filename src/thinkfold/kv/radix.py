"""Prefix tree over full pages of visible tokens, one page a node, one root a namespace.

Holds page ids and token tuples; who may publish what is the manager's business. The idea
of sharing prefixes through a tree is SGLang's RadixAttention (arXiv 2312.07104).

A page knows the sessions that have used it, so that a session can be forgotten although the tree is
shared: with it goes what only it has used. No page has users that the page before it has not.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from thinkfold.kv.pages import PagePool

Namespace = tuple[str, ...]
_MOST_SESSIONS = 8  # that a page names; one that more have used is a prompt of many, and nobody's own


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None
    key: tuple[int, ...]
    page: int
    last_used: int = 0
    queued: bool = False  # stands in the line of idle leaves
    sessions: frozenset[str] | None = frozenset()  # that have used it; None: somebody without one, or too many
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)

    def used(self, now: int, session: str) -> None:
        """`session` uses it; "" is none."""
        self.last_used = now
        if self.sessions is None or session in self.sessions:
            return
        named = session and len(self.sessions) < _MOST_SESSIONS
        self.sessions = self.sessions | {session} if named else None


class RadixCache:
    """Longest-prefix lookup of pages, with least-recently-used eviction of idle leaves."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Namespace, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._idle_leaves: list[tuple[int, int, _Node]] = []  # lazy heap, each node at most once
        self._clock = itertools.count(1)
        self._tie = itertools.count()

    def __len__(self) -> int:
        return len(self._by_page)

    def match(self, namespace: Namespace, token_ids: Sequence[int], limit: int, session: str = "") -> list[int]:
        """Pages of the longest known prefix of `token_ids[:limit]`; marks them as just used, by `session`."""
        node = self._roots.get(namespace)
        pages: list[int] = []
        now = next(self._clock)
        for key in self._keys(token_ids, limit):
            node = node.children.get(key) if node else None
            if node is None:
                break
            node.used(now, session)
            pages.append(node.page)
        return pages

    def insert(
        self,
        namespace: Namespace,
        token_ids: Sequence[int],
        pages: Sequence[int],
        start: int,
        parted: bool,
        session: str = "",
    ) -> tuple[list[int], bool]:
        """Publish `pages` (page i holds tokens of page i) that `session` has written, from index `start` on.

        Pages before `start` are in the tree already. Returns the tree's own page for each
        index from `start`: another id than the given one where an equal page was known.
        `parted`: forks of the caller hold other pages before these than the tree does. A page
        that such a fork holds, too, may not stand below the tree's, so the list ends there.
        """
        refs = self._pool.refs
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(None, (), -1)
        node = root if start == 0 else self._by_page[pages[start - 1]]
        now = next(self._clock)
        known: list[int] = []
        for index in range(start, len(pages)):
            low = index * self._page_size
            key = tuple(token_ids[low : low + self._page_size])
            child = node.children.get(key)
            if child is None:
                if parted and refs[pages[index]] > 1:
                    break
                child = _Node(node, key, pages[index])
                node.children[key] = child
                self._by_page[pages[index]] = child
                self._pool.adopt(pages[index])
            elif child.page != pages[index]:
                parted |= refs[pages[index]] > 1
            child.used(now, session)
            known.append(child.page)
            node = child
        return known, parted

    def note_idle(self, page: int) -> None:
        """A holder let go of `page`: it may be evicted from now on if nobody else holds it."""
        node = self._by_page.get(page)
        if node is not None and not node.queued and self._evictable(node):
            self._queue(node)

    def evict(self, count: int) -> int:
        """Drop up to `count` least recently used idle pages; returns how many went."""
        dropped = 0
        while dropped < count and self._idle_leaves:
            stamp, _, node = heapq.heappop(self._idle_leaves)
            node.queued = False
            if not self._evictable(node):
                continue  # it comes back when it is idle again
            if stamp != node.last_used:  # used since: back in line
                self._queue(node)
                continue
            self._drop(node)
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Drop every idle page."""
        self.evict(len(self._by_page))

    def forget(self, labels: Namespace, session: str = "") -> int:
        """Drop the idle pages of every namespace that begins with `labels`; returns how many went.

        With `session` only those that it alone has used. It is forgotten as a user of the others.
        """
        stack = [root for name, root in self._roots.items() if name[: len(labels)] == labels]
        nodes: list[_Node] = []
        while stack:
            children = stack.pop().children.values()
            nodes += children
            stack += children
        before = len(self._by_page)
        for node in reversed(nodes):  # leaves first
            if session:
                if node.sessions is None or session not in node.sessions:
                    continue
                node.sessions -= {session}
            if (not session or not node.sessions) and self._evictable(node):
                self._drop(node)
        self._idle_leaves = [entry for entry in self._idle_leaves if self._by_page.get(entry[2].page) is entry[2]]
        heapq.heapify(self._idle_leaves)
        return before - len(self._by_page)

    def pages(self) -> Iterator[int]:
        """All pages the tree holds."""
        return iter(self._by_page)

    def _evictable(self, node: _Node) -> bool:
        return not node.children and self._pool.refs[node.page] == 1 and not self._pool.pinned(node.page)

    def _queue(self, node: _Node) -> None:
        node.queued = True
        heapq.heappush(self._idle_leaves, (node.last_used, next(self._tie), node))

    def _drop(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del self._by_page[node.page]
        self._pool.disown(node.page)
        if parent.parent is not None:
            self.note_idle(parent.page)
        elif not parent.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}

    def _keys(self, token_ids: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        size = self._page_size
        return (tuple(token_ids[low : low + size]) for low in range(0, limit - size + 1, size))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every node is reachable once and every idle leaf is in line."""
        seen: dict[int, _Node] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node and child.key == key, "a child has lost its parent"
                assert child.page not in seen, f"page {child.page} is in the tree twice"
                assert len(key) == self._page_size, "a node is not a full page"
                users = node.sessions if node.parent is not None else None
                assert users is None or (child.sessions is not None and child.sessions <= users), "users are off"
                seen[child.page] = child
                stack.append(child)
        assert seen == self._by_page, "the page index disagrees with the tree"
        queued = [node.page for _, _, node in self._idle_leaves]
        assert sorted(queued) == sorted(p for p, n in seen.items() if n.queued), "the line of idle leaves is off"
        for page, node in seen.items():
            if self._pool.refs[page] == 1:
                safe = node.children or self._pool.pinned(page)
                assert node.queued or safe, f"idle page {page} could never be evicted"
                held = [c.page for c in node.children.values() if self._pool.refs[c.page] > 1]
                assert not held, f"pages {held} are held without their parent {page}"
