"""Search over steps of thinking: a beam, and a tree of thoughts. Logic only.

Works on an engine's primitives behind `Steps`: fork, extend by one step, score, drop, finish.
A state holds a branch of the engine, whose thinking is not folded while it is held; every
state is dropped at the end, also after an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from thinkfold.control.best_of import Candidate, choose
from thinkfold.control.equality import Equality
from thinkfold.control.verifier import with_median
from thinkfold.types import SearchParams

MAX_ITERATIONS = 15  # of a tree of thoughts


@dataclass(frozen=True, slots=True)
class State:
    """A branch of thinking. `key` names it to the engine, `text` is all of its thinking so far.

    `tokens` counts this step only; `ended` says that the model has ended thinking by itself;
    `confidence` is the step's mean token confidence, the score where there is no verifier.
    """

    key: str
    text: str
    tokens: int
    ended: bool = False
    confidence: float = 0.0


class Steps(Protocol):
    """What search needs of an engine."""

    async def root(self) -> State:
        """The prompt, with thinking open."""
        ...

    async def extend(self, state: State, count: int, min_tokens: int, max_tokens: int) -> list[State]:
        """`count` forks of a state, each one step further: up to a paragraph's end within the limits."""
        ...

    async def score(self, states: Sequence[State]) -> list[float | None] | None:
        """The verifier's score of each state; None instead of a list if there is no verifier."""
        ...

    async def finish(self, state: State) -> tuple[str, int]:
        """End thinking where it has not ended; the visible reply, and the tokens of it."""
        ...

    async def drop(self, state: State) -> None:
        """Forget a state; once each."""
        ...


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The chosen reply; `tokens` counts all that was generated, `path_tokens` the chosen path alone."""

    reply: str
    score: float
    tokens: int
    path_tokens: int
    expanded: int
    candidates: tuple[Candidate, ...]


@dataclass(slots=True)
class _Node:
    state: State
    score: float
    depth: int
    path_tokens: int

    @property
    def rank(self) -> tuple[float, int, str]:
        """Best first by score, then shorter, then by text, so that the order of arrival does not matter."""
        return -self.score, self.path_tokens, self.state.text


@dataclass(slots=True)
class _Search:
    """What both methods share: open nodes, ended ones, counts."""

    params: SearchParams
    steps: Steps
    equality: Equality
    tokens: int = 0
    expanded: int = 0
    held: dict[str, State] = field(default_factory=dict)
    ended: list[_Node] = field(default_factory=list)

    async def expand(self, nodes: Sequence[_Node]) -> list[_Node]:
        """Children of all nodes that have not ended, scored, without equal texts; the parents are dropped."""
        _, branch, _ = self.params.sizes
        limits = self.params.min_step_tokens, self.params.max_step_tokens
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._children(node, branch, *limits)) for node in nodes]
        self.expanded += len(nodes)
        children: list[_Node] = []
        seen: set[str] = set()
        for child in (child for task in tasks for child in task.result()):
            if child.state.text in seen:
                await self.drop(child)
            else:
                seen.add(child.state.text)
                children.append(child)
        for node in nodes:
            await self.drop(node)
        await self._score(children)
        self.ended += [child for child in children if child.state.ended]
        return [child for child in children if not child.state.ended]

    async def drop(self, node: _Node) -> None:
        if self.held.pop(node.state.key, None) is not None:
            await self.steps.drop(node.state)

    async def keep_best(self, nodes: list[_Node], count: int) -> list[_Node]:
        """The best `count`; the others are dropped."""
        nodes = sorted(nodes, key=lambda node: node.rank)
        for node in nodes[count:]:
            await self.drop(node)
        return nodes[:count]

    async def finish(self, nodes: Sequence[_Node]) -> SearchResult:
        """Write the answers of these nodes and choose as best-of-N does."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.steps.finish(node.state)) for node in nodes]
        replies = [task.result() for task in tasks]
        self.tokens += sum(tokens for _, tokens in replies)
        paths = [node.path_tokens + tokens for node, (_, tokens) in zip(nodes, replies, strict=True)]
        made = zip(nodes, replies, paths, strict=True)
        candidates = [Candidate(i, reply, path, node.score) for i, (node, (reply, _), path) in enumerate(made)]
        best = choose(candidates, self.equality)
        assert best is not None
        return SearchResult(best.reply, best.score or 0.0, self.tokens, best.tokens, self.expanded, tuple(candidates))

    async def _children(self, node: _Node, count: int, low: int, high: int) -> list[_Node]:
        states = await self.steps.extend(node.state, count, low, high)
        self.held |= {state.key: state for state in states}
        self.tokens += sum(state.tokens for state in states)
        return [_Node(state, 0.0, node.depth + 1, node.path_tokens + state.tokens) for state in states]

    async def _score(self, nodes: Sequence[_Node]) -> None:
        scores = await self.steps.score([node.state for node in nodes]) if nodes else []
        filled = [node.state.confidence for node in nodes] if scores is None else with_median(scores)
        for node, score in zip(nodes, filled, strict=True):
            node.score = score


async def search(params: SearchParams, steps: Steps, equality: Equality | None = None) -> SearchResult:
    """Search from the prompt to one reply. Raises what a primitive raises; drops every state in any case."""
    run = _Search(params, steps, equality or Equality())
    root = await steps.root()
    run.held[root.key] = root
    try:
        start = _Node(root, 0.0, 0, 0)
        return await (_beam(run, start) if params.method == "beam" else _tree(run, start))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        for state in list(run.held.values()):
            await steps.drop(state)


async def _beam(run: _Search, root: _Node) -> SearchResult:
    """Depth by depth: all states of the beam get children, the best of these are the next beam.

    States that end thinking leave the beam, and it is narrower by them from then on; with a full
    width of them the search is over. What is open after the last depth writes its answer from there.
    """
    width, _, depth = run.params.sizes
    beam = [root]
    for _ in range(depth):
        children = await run.expand(beam)
        run.ended = await run.keep_best(run.ended, width)
        beam = await run.keep_best(children, width - len(run.ended))
        if not beam:
            break
    return await run.finish([*run.ended, *beam])


async def _tree(run: _Search, root: _Node) -> SearchResult:
    """Best first: the best open states anywhere in the tree are expanded, so that a poor thought is left again.

    At most `width` states are expanded at once and width × branch stay open. Only the best leaf
    (ended, or at full depth) writes its answer, unless several ended with the same score.
    """
    width, branch, depth = run.params.sizes
    open_nodes, leaves = [root], []
    for _ in range(MAX_ITERATIONS):
        chosen = open_nodes[:width]
        children = await run.expand(chosen)
        leaves += [child for child in children if child.depth >= depth]
        rest = open_nodes[width:] + [child for child in children if child.depth < depth]
        open_nodes = await run.keep_best(rest, width * branch)
        best_leaf = max((node.score for node in [*leaves, *run.ended]), default=None)
        if not open_nodes or (best_leaf is not None and open_nodes[0].score <= best_leaf):
            break
    ready = sorted([*leaves, *run.ended], key=lambda node: node.rank) or open_nodes
    return await run.finish([node for node in ready if node.score == ready[0].score])
