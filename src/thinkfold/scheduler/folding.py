"""From what planners say is due to the memory work of a step: prepare, commit, refuse, offload. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from thinkfold.fold.planner import FoldPlanner
from thinkfold.fold.spans import Span
from thinkfold.kv.manager import KVManager
from thinkfold.kv.summary import SummaryGrowth, SummaryTable
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import FoldCommit, FoldPrepare, MemoryWork
from thinkfold.types import Fold


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A fold of pages that other branches hold, too: they may take its summary instead of writing their own.

    `before` is the summary that it went behind, `lengths` are all entries by head after it.
    """

    fold_id: int
    branch: Branch
    end: int
    before: SummaryTable
    lengths: list[int]
    error: float
    whole: bool  # quantised, not folded


FoldCounts = Callable[[int, int], list[int]]
DROP = "drop"  # the selector that keeps nothing
QUANTISES = 0.75  # the rung is worth taking where summaries keep an entry in no more of a raw one's memory


class FoldDesk:
    """Folds spans of running branches in two phases; the planner of a branch says which and when.

    `counts(entries, tokens)` gives the entries of each head that a fold of `tokens` keeps. Where summaries are kept in
    fewer bits, what is folded to win memory is first quantised: that costs next to nothing, and it may be folded later.
    """

    def __init__(self, kv: KVManager, counts: FoldCounts) -> None:
        self._kv = kv
        self._counts = counts
        self._quantises = kv.summary_share <= QUANTISES
        self._gains: dict[tuple[int, int, bool, bool], int] = {}  # as `_gain` has them
        self._ids = itertools.count()
        self._prepared: dict[int, tuple[Branch, FoldPlanner, Span]] = {}
        self._written: dict[tuple[int, ...], _Written] = {}  # by the pages that were folded
        self._committed: dict[int, Branch] = {}  # whose commits are in a step that has not finished
        self.work = MemoryWork()  # of the step being planned
        self.changed: set[int] = set()  # branches whose memory that work touches, by id
        self.done: list[tuple[Branch, Fold]] = []  # folds and refusals that nobody has taken yet
        self.totals: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether the step being planned folds something, or a fold waits for what it does."""
        work = self.work
        return bool(work.prepares or work.commits or work.adopted or work.summaries)

    @property
    def pressing(self) -> bool:
        """Whether a fold that wins memory is under way."""
        return any(span.pressed for _, _, span in self._prepared.values())

    def presses(self, branches: Sequence[Branch]) -> bool:
        """Whether such a fold of one of these branches is under way."""
        return any(span.pressed and branch in branches for branch, _, span in self._prepared.values())

    def advance(self, branch: Branch, *, stuck: bool) -> bool:
        """Do what is due before the branch's next row; False if that row must wait for it.

        `stuck`: no step in flight can bring memory or an estimate any more. What is raised becomes the branch's
        error: one request's folds must not stop the others.
        """
        planner = branch.folding
        if planner is None:
            return True
        try:
            return self._advance(branch, planner, stuck=stuck)
        except Exception as error:
            branch.error = error
            return True

    def _advance(self, branch: Branch, planner: FoldPlanner, *, stuck: bool) -> bool:
        planner.observe(branch.steering.segment_ends, branch.steering.answer_start)
        position = branch.num_computed_tokens
        while (span := planner.to_commit(position)) is not None:
            if span.error is None and span.pressed:
                break  # its estimate is still to come, and no position waits for it
            if span.error is None or not self._settle(branch, planner, span, stuck=stuck):
                return False
        while (span := planner.to_prepare(position)) is not None:
            if self._gain(planner, False, span) > 0:
                self._prepare(branch, planner, span)
            else:
                planner.give_up(span)  # its summary would take as many pages
        offload = planner.to_offload(position)
        if offload is not None and not self._offload(branch, planner, position, offload):
            planner.not_offloaded(position)
        return True

    def press(
        self, branches: Sequence[Branch], planned: Mapping[int, int], *, force: bool = False
    ) -> Literal["quantise", "fold"] | None:
        """Start to quantise or to fold the span that wins most memory; which of them, None if there is none.

        Answering branches come first, then segments that are old enough for their fold to be a good one. What is
        quantised is folded when nothing raw is left to quantise.

        `planned` are positions before the rows of the step being planned, by a branch's id: what those rows write is
        not there yet. `force` takes what the gate has refused, too, and does not ask it again.
        """
        for whole in (False, True) if self._quantises else (False,):
            found = self._best(branches, planned, whole, force=force)
            if found is not None:
                branch, planner, span = found
                to_whole = self._quantises and not whole and self._kv.has_room(self._all(span))
                self._prepare(branch, planner, span, pressed=True, to_whole=to_whole)
                span.forced = force
                return "quantise" if to_whole else "fold"
        return None

    def _best(
        self, branches: Iterable[Branch], planned: Mapping[int, int], whole: bool, *, force: bool
    ) -> tuple[Branch, FoldPlanner, Span] | None:
        """The quantised span (`whole`), or the raw one, that comes first."""
        best: tuple[tuple[bool, bool, int], Branch, FoldPlanner, Span] | None = None
        for branch, planner in _foldable(branches):
            position = planned.get(id(branch), branch.num_computed_tokens)
            worth = partial(self._gain, planner, self._quantises and not whole)
            try:
                found = planner.under_pressure(position, worth, force=force, whole=whole)
            except Exception as error:  # as in `advance`
                branch.error = error
                continue
            if found is not None:
                rank = (planner.answering, found[0], found[1])
                if best is None or rank > best[0]:
                    best = (rank, branch, planner, found[2])
        return None if best is None else best[1:]

    def offload(self, branches: Iterable[Branch], planned: Mapping[int, int]) -> bool:
        """Move the thinking of one branch that answers to the host, as its policy wants it when memory is short."""
        for branch, planner in _foldable(branches):
            position = planned.get(id(branch), branch.num_computed_tokens)
            pages = planner.to_offload(position, short=True)
            if pages is not None and self._offload(branch, planner, position, pages):
                return True
        return False

    def judge(self, fold_id: int, error: float) -> None:
        """The estimate of a prepared fold has come home; ids of forgotten ones are ignored."""
        if fold_id in self._prepared:
            self._prepared[fold_id][2].error = error

    def owner(self, fold_id: int) -> Branch | None:
        """Whose fold it is; None if that branch has ended or given up its memory."""
        if fold_id in self._prepared:
            return self._prepared[fold_id][0]
        return self._committed.get(fold_id)

    def written(self, commits: Iterable[FoldCommit]) -> None:
        """The step that holds these commits has finished."""
        for commit in commits:
            self._committed.pop(commit.fold_id, None)

    def forget(self, branch: Branch) -> None:
        """The branch's memory is given up: choices that wait on the device for it are dropped."""
        mine = [fold_id for fold_id, (owner, _, _) in self._prepared.items() if owner is branch]
        for fold_id in mine:
            del self._prepared[fold_id]
        self.work.dropped += mine
        self._written = {pages: known for pages, known in self._written.items() if known.branch is not branch}
        self._committed = {i: owner for i, owner in self._committed.items() if owner is not branch}

    def withdraw(self, branch: Branch) -> None:
        """The branch stops for a while: what others would wait for is not folded now."""
        for fold_id, (owner, planner, span) in list(self._prepared.items()):
            if owner is branch and span.pressed:
                del self._prepared[fold_id]
                self.work.dropped.append(fold_id)
                planner.withdraw(span)

    def take(self) -> MemoryWork:
        """The memory work of the step being planned, with the manager's copies."""
        work, self.work = self.work, MemoryWork()
        copies = self._kv.take_work()
        work.swap_out, work.blocks_out = copies.swap_out, copies.blocks_out
        work.copies, work.swap_in, work.blocks_in = copies.copies, copies.swap_in, copies.blocks_in
        self.changed.clear()
        return work

    def _prepare(
        self, branch: Branch, planner: FoldPlanner, span: Span, *, pressed: bool = False, to_whole: bool = False
    ) -> None:
        fold_id, policy = next(self._ids), planner.policy
        blocks = self._blocks(branch, planner, span) if span.whole else None
        pages = [] if span.whole else self._pages(branch, planner, span)
        self.work.prepares.append(
            FoldPrepare(
                fold_id, branch.slot, pages, span.end, span.ends, policy.selector, _entries(planner), to_whole, blocks
            )
        )
        self._prepared[fold_id] = (branch, planner, span)
        planner.prepare(span, branch.num_computed_tokens, pressed=pressed, to_whole=to_whole)
        self.changed.add(id(branch))

    def _settle(self, branch: Branch, planner: FoldPlanner, span: Span, *, stuck: bool) -> bool:
        """Commit or refuse a judged span; False if the memory for its summary is still to come."""
        error = span.error
        assert error is not None, "a span is judged before it is settled"
        if any(slot == branch.slot for slot, _, _ in (*self.work.adopted, *self.work.summaries)):
            return False  # its tables are set after the step's commits
        fold_id = next(i for i, (_, _, known) in self._prepared.items() if known is span)
        growth, before, pages, whole = None, self._held(), [], span.to_whole
        shared, summary = False, branch.table.summary
        if span.forced or error <= planner.policy.gate:  # never with an estimate that is not a number
            pages = [] if span.whole else self._pages(branch, planner, span)
            known = self._known(branch, span, pages)
            if known is not None:
                return self._adopt(branch, planner, span, fold_id, known, stuck=stuck)
            shared = self._kv.shared(pages)
            growth = self._grow(branch, planner, span, pages)
            if growth is None and not stuck:
                return False
            if growth is None and whole:  # there may be room to fold it
                del self._prepared[fold_id]
                self.work.dropped.append(fold_id)
                planner.withdraw(span)
                return True
        del self._prepared[fold_id]
        start = span.start - planner.num_prompt_tokens
        fold = Fold(fold_id, start, start + span.tokens, 0.0, 0, error, refused=growth is None, quantised=whole)
        if growth is None:
            self.work.dropped.append(fold_id)
            planner.give_up(span)
            self.totals["refused"] += 1
        else:
            self.work.commits.append(self._commit(fold_id, branch, span, pages, growth))
            self._committed[fold_id] = branch
            if shared:
                written = _Written(fold_id, branch, span.end, summary, branch.table.summary.lengths, error, whole)
                self._written[tuple(pages)] = written
            mean = sum(growth.counts) / len(growth.counts)
            fold = replace(fold, entries=mean, pages_freed=before - self._held())
            self._count(branch, planner, span)
        self._tell(branch, planner, span, fold)
        return True

    def _grow(self, branch: Branch, planner: FoldPlanner, span: Span, pages: Sequence[int]) -> SummaryGrowth | None:
        """Put a summary in the place of the span; None, and nothing changes, if its memory is not there now."""
        counts = self._all(span) if span.to_whole else self._counts(_entries(planner), span.tokens)
        if not span.whole:
            return self._kv.fold(branch.table, planner.first_page(span), len(pages), counts)
        length = span.tokens // self._kv.page_size
        growth = self._kv.refold(branch.table, self._places(branch, planner, span), length, counts)
        if growth is not None:  # what others would take of it stands elsewhere now
            self._written = {key: known for key, known in self._written.items() if known.branch is not branch}
        return growth

    def _commit(self, fold_id: int, branch: Branch, span: Span, pages: list[int], growth: SummaryGrowth) -> FoldCommit:
        summary = branch.table.summary
        return FoldCommit(
            fold_id, branch.slot, pages, growth, (summary.blocks, summary.lengths) if span.whole else None
        )

    def _known(self, branch: Branch, span: Span, pages: list[int]) -> _Written | None:
        """What a branch of the same past has written for the same pages, behind the same summary."""
        known = self._written.get(tuple(pages))
        if known is None or known.branch.table.swapped or (known.end, known.whole) != (span.end, span.to_whole):
            return None
        mine, theirs = branch.table.summary, known.before
        same = mine.blocks == theirs.blocks and mine.lengths == theirs.lengths
        return known if same and known.branch.token_ids[: span.end] == branch.token_ids[: span.end] else None

    def _adopt(
        self, branch: Branch, planner: FoldPlanner, span: Span, fold_id: int, known: _Written, *, stuck: bool
    ) -> bool:
        """A fold of what branches share is written once; False while the step that writes it may still fail."""
        if known.fold_id in self._committed and not stuck:
            return False
        before, old, first = self._held(), sum(branch.table.summary.lengths), planner.first_page(span)
        self._kv.adopt(branch.table, known.branch.table, first, span.tokens // self._kv.page_size, known.lengths)
        summary = branch.table.summary
        self.work.adopted.append((branch.slot, summary.blocks, summary.lengths))
        self.work.dropped.append(fold_id)
        del self._prepared[fold_id]
        start, entries = span.start - planner.num_prompt_tokens, (sum(summary.lengths) - old) / self._kv.num_heads
        freed = before - self._held()
        self._count(branch, planner, span)
        fold = Fold(fold_id, start, start + span.tokens, entries, freed, known.error, quantised=known.whole)
        self._tell(branch, planner, span, fold)
        self.totals["folds_shared"] += 1
        return True

    def _count(self, branch: Branch, planner: FoldPlanner, span: Span) -> None:
        """The span has left the branch's raw table, or what was quantised is folded."""
        kind = ("quantised", "quantised_tokens") if span.to_whole else ("folds", "folded_tokens")
        planner.remove(span, branch.table.summary.lengths)
        self.changed.add(id(branch))
        self.totals[kind[0]] += 1
        self.totals[kind[1]] += span.tokens

    def _tell(self, branch: Branch, planner: FoldPlanner, span: Span, fold: Fold) -> None:
        news = (span.start, fold.refused, fold.quantised)
        if news not in planner.told:  # else it was told before a preemption
            planner.told.add(news)
            self.done.append((branch, fold))

    def _offload(self, branch: Branch, planner: FoldPlanner, position: int, pages: tuple[int, int]) -> bool:
        first, end = pages
        if not self._kv.offload(branch.table, first, end - first):
            return False
        self.changed.add(id(branch))
        self.totals["offloads"] += 1
        branch.swapped_pages += end - first
        planner.offloaded(position)
        return True

    def _pages(self, branch: Branch, planner: FoldPlanner, span: Span) -> list[int]:
        first = planner.first_page(span)
        return branch.table.pages[first : first + span.tokens // self._kv.page_size]

    def _held(self) -> int:
        return sum(self._kv.usage().values())

    def _places(self, branch: Branch, planner: FoldPlanner, span: Span) -> list[int]:
        """Number of a quantised span's first block in each head."""
        before = planner.entries_before(span) or [0] * self._kv.num_heads
        return [entries // self._kv.page_size for entries in before]

    def _blocks(self, branch: Branch, planner: FoldPlanner, span: Span) -> list[list[int]]:
        """A quantised span's blocks by head."""
        length = span.tokens // self._kv.page_size
        lists = zip(branch.table.summary.blocks, self._places(branch, planner, span), strict=True)
        return [blocks[place : place + length] for blocks, place in lists]

    def _all(self, span: Span) -> list[int]:
        """What a quantised span keeps in each head."""
        return [span.tokens] * self._kv.num_heads

    def _gain(self, planner: FoldPlanner, to_whole: bool, span: Span) -> int:
        """Pages that a fold of the span wins, or with `to_whole` to quantise it."""
        key = (_entries(planner), span.tokens, span.whole, to_whole)
        if key not in self._gains:
            counts = self._all(span) if to_whole else self._counts(key[0], span.tokens)
            held = self._kv.pages_for_fold(self._all(span)) if span.whole else span.tokens // self._kv.page_size
            self._gains[key] = held - self._kv.pages_for_fold(counts)
        return self._gains[key]


def _foldable(branches: Iterable[Branch]) -> Iterator[tuple[Branch, FoldPlanner]]:
    """Running branches that have folds and have not failed."""
    for branch in branches:
        if branch.folding is not None and branch.slot >= 0 and branch.error is None:
            yield branch, branch.folding


def _entries(planner: FoldPlanner) -> int:
    return 0 if planner.policy.selector == DROP else planner.policy.entries
