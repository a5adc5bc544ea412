"""Search over steps of thinking: a beam, and a tree of thoughts. Logic only.

Works on an engine's primitives behind `Steps`: fork, extend by one step, score, drop, finish.
A state holds a branch of the engine, whose thinking is not folded while it is held; every
state is dropped at the end, also after an error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from thinkfold.control.best_of import Candidate, choose
from thinkfold.control.equality import Equality
from thinkfold.control.extract import extract
from thinkfold.control.verifier import with_median
from thinkfold.errors import ConflictError, NotFoundError
from thinkfold.types import SearchNode, SearchParams, SearchState, Verdict

MAX_ROUNDS = 15  # of a tree of thoughts

Fate = Literal["open", "expanded", "ended", "dropped", "equal", "lost", "answered", "chosen"]


@dataclass(frozen=True, slots=True)
class State:
    """A branch of thinking. `key` names it to the engine, `text` is all of its thinking so far.

    `tokens` counts this step only; `ended` says that the model has ended thinking by itself;
    `confidence` is the step's mean token confidence, the score where nothing else is asked.
    """

    key: str
    text: str
    tokens: int
    ended: bool = False
    confidence: float = 0.0


class Steps(Protocol):
    """What search needs of an engine. A state that is not there any more raises NotFoundError."""

    @property
    def probe_tokens(self) -> int:
        """Tokens that scores have cost so far."""
        ...

    async def root(self) -> State:
        """The prompt, with thinking open."""
        ...

    async def extend(self, state: State, count: int, min_tokens: int, max_tokens: int) -> list[State]:
        """`count` forks of a state, each one step further: up to a boundary within the limits."""
        ...

    async def score(self, states: Sequence[State]) -> list[Verdict] | None:
        """A verdict on each state; None where its confidence is the score."""
        ...

    async def finish(self, state: State, max_tokens: int | None) -> tuple[str, int]:
        """End thinking where it has not ended; the visible reply, and the tokens written for it."""
        ...

    async def drop(self, state: State) -> None:
        """Forget a state; once each."""
        ...


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The chosen reply and the `key` of its state; `tokens` counts all that was generated, `path_tokens` its path."""

    reply: str
    key: str
    score: float
    tokens: int
    path_tokens: int
    expanded: int
    candidates: tuple[Candidate, ...]


@dataclass(slots=True)
class _Node:
    number: int
    parent: int | None
    state: State
    depth: int
    path_tokens: int
    score: float = 0.0
    error: str | None = None
    fate: Fate = "open"

    @property
    def rank(self) -> tuple[float, int, str]:
        """Best first by score, then shorter, then by text, so that the order of arrival does not matter."""
        return -self.score, self.path_tokens, self.state.text

    def shown(self) -> SearchNode:
        return SearchNode(self.number, self.parent, self.depth, self.state.tokens, self.score, self.fate, self.error)


class Search:
    """One search. `changed` is called when `state()` has news."""

    def __init__(
        self,
        params: SearchParams,
        steps: Steps,
        equality: Equality | None = None,
        *,
        verifier: str | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._params, self._steps, self._equality = params, steps, equality or Equality()
        self._verifier, self._changed = verifier, changed
        self._nodes: list[_Node] = []
        self._held: dict[str, State] = {}
        self._ended: list[_Node] = []
        self._written = 0  # tokens of steps and answers
        self._expanded = 0
        self._rule: str | None = None
        self._result: SearchResult | None = None

    async def run(self) -> SearchResult:
        """Search from the prompt to one reply. Raises what a primitive raises; drops every state in any case."""
        root = await self._steps.root()
        self._held[root.key] = root
        self._nodes.append(_Node(0, None, root, 0, 0))
        try:
            found = await (self._beam() if self._params.kind == "beam" else self._tree())
            self._result = await self._finish(found)
            self._changed()
            return self._result
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            for state in list(self._held.values()):
                await self._steps.drop(state)

    @property
    def tokens(self) -> int:
        """All tokens that were generated for it."""
        return self._written + self._steps.probe_tokens

    def state(self) -> SearchState:
        """Where it stands; its nodes are told at the end only."""
        params, result = self._params, self._result
        width, branch, depth = params.sizes
        fates = Counter(node.fate for node in self._nodes)
        chosen = next((node for node in self._nodes if node.fate == "chosen"), None)
        kept = 0 if result is None else result.path_tokens
        return SearchState(
            kind=params.kind,
            width=width,
            branch=branch,
            depth=depth,
            score=params.scored_by,
            verifier=self._verifier,
            step=params.step,
            min_step_tokens=params.min_step_tokens,
            max_step_tokens=params.max_step_tokens,
            max_tokens=params.max_tokens,
            expanded=self._expanded,
            deepest=max((node.depth for node in self._nodes), default=0),
            open=fates["open"],
            ended=fates["ended"],
            lost=fates["lost"],
            misses=sum(node.error is not None for node in self._nodes),
            tokens=self.tokens,
            probe_tokens=self._steps.probe_tokens,
            kept_tokens=kept,
            discarded_tokens=0 if result is None else self.tokens - kept,
            best=max((node.score for node in self._nodes[1:]), default=None),
            answer=None if result is None else extract(result.reply).answer,
            rule=None if result is None else self._rule,
            node=None if chosen is None else chosen.number,
            nodes=() if result is None else tuple(node.shown() for node in self._nodes),
        )

    async def _beam(self) -> list[_Node]:
        """Depth by depth: all states of the beam get children, the best of these are the next beam.

        States that end thinking leave the beam, and it is narrower by them from then on; with a full
        width of them the search is over. What is open after the last depth writes its answer from there.
        """
        width, _, depth = self._params.sizes
        beam = self._nodes[:1]
        for _ in range(depth):
            chosen = self._affordable(beam)
            if not chosen:
                self._rule = "max_tokens"
                break
            children = await self._expand(chosen)
            self._ended = await self._keep_best(self._ended, width)
            left = [node for node in beam if node.fate == "open"]
            beam = await self._keep_best([*children, *left], width - len(self._ended))
            if not beam:
                self._rule = "ended"
                break
        else:
            self._rule = "depth"
        return [*self._ended, *beam]

    async def _tree(self) -> list[_Node]:
        """Best first: the best open states anywhere in the tree are expanded, so that a poor thought is left again.

        At most `width` states are expanded at once and width × branch stay open. Only the best leaf
        (ended, or at full depth) writes its answer, unless several ended with the same score.
        """
        width, branch, depth = self._params.sizes
        open_nodes, leaves = self._nodes[:1], []
        self._rule = "rounds"
        for _ in range(MAX_ROUNDS):
            chosen = self._affordable(open_nodes[:width])
            if not chosen:
                self._rule = "max_tokens"
                break
            children = await self._expand(chosen)
            self._ended = await self._keep_best(self._ended, width * branch)
            leaves = await self._keep_best([*leaves, *(c for c in children if c.depth >= depth)], width * branch)
            rest = [node for node in open_nodes if node.fate == "open"]
            rest += [child for child in children if child.depth < depth]
            open_nodes = await self._keep_best(rest, width * branch)
            best_leaf = max((node.score for node in [*leaves, *self._ended]), default=None)
            if not open_nodes or (best_leaf is not None and open_nodes[0].score <= best_leaf):
                self._rule = "best" if open_nodes else "ended"
                break
        ready = sorted([*leaves, *self._ended], key=lambda node: node.rank) or open_nodes
        return [node for node in ready if node.score == ready[0].score]

    def _affordable(self, nodes: Sequence[_Node]) -> list[_Node]:
        """The best of these that may still be expanded, with an answer's reserve left behind them."""
        params = self._params
        if params.max_tokens is None:
            return list(nodes)
        each = params.sizes[1] * (params.max_step_tokens + params.score_tokens)
        return list(nodes[: max(0, (params.max_tokens - self.tokens - params.reserve) // each)])

    async def _expand(self, nodes: Sequence[_Node]) -> list[_Node]:
        """Children of all nodes that have not ended, scored, without equal texts; the parents are dropped."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._children(node)) for node in nodes]
        self._expanded += len(nodes)
        children: list[_Node] = []
        seen: set[str] = set()
        for node, task in zip(nodes, tasks, strict=True):
            for state in task.result():
                path = node.path_tokens + state.tokens
                child = _Node(len(self._nodes), node.number, state, node.depth + 1, path)
                self._nodes.append(child)
                if state.text in seen:
                    await self._drop(child, "equal")
                else:
                    seen.add(state.text)
                    children.append(child)
            if node.fate == "open":
                await self._drop(node, "expanded")
        await self._score(children)
        for child in children:
            if child.state.ended:
                child.fate = "ended"
                self._ended.append(child)
        self._changed()
        return [child for child in children if not child.state.ended]

    async def _children(self, node: _Node) -> list[State]:
        params = self._params
        try:
            found = await self._steps.extend(
                node.state, params.sizes[1], params.min_step_tokens, params.max_step_tokens
            )
        except NotFoundError:  # its state was driven out by others'
            await self._drop(node, "lost")
            return []
        self._held |= {state.key: state for state in found}
        self._written += sum(state.tokens for state in found)
        return found

    async def _score(self, nodes: Sequence[_Node]) -> None:
        verdicts = await self._steps.score([node.state for node in nodes]) if nodes else []
        if verdicts is None:
            for node in nodes:
                node.score = node.state.confidence
            return
        scores = with_median([verdict.score for verdict in verdicts])
        for node, score, verdict in zip(nodes, scores, verdicts, strict=True):
            node.score, node.error = score, verdict.error

    async def _drop(self, node: _Node, fate: Fate) -> None:
        node.fate = fate
        if self._held.pop(node.state.key, None) is not None:
            await self._steps.drop(node.state)

    async def _keep_best(self, nodes: list[_Node], count: int) -> list[_Node]:
        """The best `count`; the others are dropped."""
        nodes = sorted(nodes, key=lambda node: node.rank)
        for node in nodes[count:]:
            await self._drop(node, "dropped")
        return nodes[:count]

    async def _finish(self, nodes: Sequence[_Node]) -> SearchResult:
        """Write the answers of these nodes, the best ones where tokens are short, and choose as best-of-N does."""
        nodes, limit = sorted(nodes, key=lambda node: node.rank), None
        if self._params.max_tokens is not None:
            left = self._params.max_tokens - self.tokens
            nodes = await self._keep_best(nodes, max(1, left // self._params.reserve))
            limit = max(1, left // max(1, len(nodes)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(node, limit)) for node in nodes]
        replies = [(node, task.result()) for node, task in zip(nodes, tasks, strict=True)]
        written = [(node, *found) for node, found in replies if found is not None]
        if not written:
            raise ConflictError("every state of the search was driven out: the engine keeps too few handles")
        candidates = [
            Candidate(i, reply, node.path_tokens + tokens, node.score)
            for i, (node, reply, tokens) in enumerate(written)
        ]
        best = await asyncio.to_thread(choose, candidates, self._equality)
        assert best is not None
        shown = written[best.number][0]
        shown.fate = "chosen"
        score, key = best.score or 0.0, shown.state.key
        return SearchResult(best.reply, key, score, self.tokens, best.tokens, self._expanded, tuple(candidates))

    async def _answer(self, node: _Node, limit: int | None) -> tuple[str, int] | None:
        try:
            reply, tokens = await self._steps.finish(node.state, limit)
        except NotFoundError:
            node.fate = "lost"
            return None
        node.fate = "answered"
        self._written += tokens
        return reply, tokens
