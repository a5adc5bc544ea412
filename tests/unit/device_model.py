"""A device without tensors that knows what every entry of its memory stands for, and finds out who reads a wrong one.

A raw entry is (logical position, token), a summary entry the span `(start, end)` it stands for. What is
drawn is a function of all that the row sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from fakes import NO_STATS

from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.output import BatchRow, MemoryWork, SampleRow, StepPlan, StepResult
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import TokenLogprobs

Draw = Callable[[SampleRow, tuple, tuple], int]


class DeviceModel:
    """A runner. `draw(sample, raw entries, spans)` is what is drawn; `bad` in 0..1 is how often folds and rows fail."""

    def __init__(self, scheduler: Scheduler, page_size: int, draw: Draw, rng: Random, bad: float = 0.0) -> None:
        self.scheduler, self.page_size, self.draw, self.rng, self.bad = scheduler, page_size, draw, rng, bad
        self.pages: dict[tuple[int, int], tuple[int, int]] = {}
        self.host: dict[tuple[int, int], tuple[int, int]] = {}
        self.blocks: dict[tuple[int, int], tuple[int, int]] = {}
        self.host_blocks: dict[tuple[int, int], tuple[int, int]] = {}
        self.tables: dict[int, tuple[list[list[int]], list[int]]] = {}  # by slot: head blocks, entries
        self.prepared: dict[int, tuple[list, tuple[int, int]]] = {}  # by fold: its raw entries, its span
        self.queries: dict[int, dict[int, int]] = {}  # by slot: tokens whose queries are kept, by position
        self.saved: dict[int, dict[int, int]] = {}
        self.drawn: dict[int, int] = {}  # by slot: the newest token
        self.counted: dict[int, list[int]] = {}  # by slot: output tokens that penalties count

    def launch(self, plan: StepPlan) -> StepResult:
        faults, errors = self.do(plan.memory, {row.slot: row.position for row in plan.rows})
        result = StepResult(plan.step, [], [], [], errors, faults)
        for row in plan.rows:
            raw = self._compute(row)
            for sample in row.samples:
                result.token_ids.append(self._sample(row, sample, raw))
                result.stats.append(NO_STATS)
                wanted = sample.params.logprobs is not None
                result.logprobs.append(TokenLogprobs(result.token_ids[-1], -0.5) if wanted else None)
        return result

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def do(
        self, work: MemoryWork, now: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[list[tuple[int, str]], list[tuple[int, float]]]:
        """A step's memory work, in its order; faults and errors of folds."""
        for slot, key in work.queries_kept:
            self.saved[key] = dict(self.queries.get(slot, {}))
        for slot, key in work.queries_out:
            self.saved[key] = self.queries.pop(slot, {})
        _move(work.swap_out, self.pages, self.host, self.page_size)
        _move(work.blocks_out, self.blocks, self.host_blocks, self.page_size)
        for fold_id in work.dropped:
            del self.prepared[fold_id]
        for commit in work.commits:
            self._commit(commit)
        _move(work.copies, self.pages, self.pages, self.page_size)
        _move(work.swap_in, self.host, self.pages, self.page_size)
        _move(work.blocks_in, self.host_blocks, self.blocks, self.page_size)
        for source, target in work.queries_shared:
            self.saved[target] = dict(self.saved[source])
        for slot, blocks, lengths in work.summaries:
            self.tables[slot] = [list(b) for b in blocks], list(lengths)
            self.queries.pop(slot, None)
        for slot, blocks, lengths in work.adopted:
            self.tables[slot] = [list(b) for b in blocks], list(lengths)
        for source, target in work.forks:
            self.queries[target] = dict(self.queries.get(source, {}))
        for key, slot in work.queries_in:
            self.queries[slot] = self.saved.pop(key)
        for key in work.queries_dropped:
            del self.saved[key]
        faults, errors = [], []
        for prepare in work.prepares:
            entries = self._read(prepare.pages)
            start = prepare.end - (len(entries) or len(prepare.blocks[0]) * self.page_size)
            if prepare.blocks is not None:
                self._check_whole(prepare.blocks, (start, prepare.end))
            assert not entries or [position for position, _ in entries] == list(range(start, prepare.end)), (
                "a span is not in one piece"
            )
            self.prepared[prepare.fold_id] = entries, (start, prepare.end)
            self._check_queries(prepare.slot, now)
            if self.rng.random() < self.bad / 10:
                faults.append((prepare.fold_id, "a fault"))
            else:
                errors.append((prepare.fold_id, self.rng.choice([0.0, 0.0, 0.6])))
        return faults, errors

    def _commit(self, commit) -> None:
        entries, span = self.prepared.pop(commit.fold_id)
        assert self._read(commit.pages) == entries, "a span has changed since it was prepared"
        growth = commit.growth
        blocks, lengths = self.tables.get(commit.slot, ([], []))
        blocks = [list(held) for held in blocks] or [[] for _ in growth.counts]
        lengths = list(lengths) or [0] * len(growth.counts)
        if commit.table is not None:
            self._replace(commit, span, blocks)
            return
        assert growth.starts == lengths, "a fold does not start where the slot's summary ends"
        for head, source, target in growth.copies:
            assert blocks[head][-1] == source, "another block is copied than the head's last one"
            for offset in range(self.page_size):
                if (source, offset) in self.blocks:
                    self.blocks[target, offset] = self.blocks[source, offset]
            blocks[head][-1] = target
        for head, count in enumerate(growth.counts):
            blocks[head] += growth.new_blocks[head]
            for i in range(lengths[head], lengths[head] + count):
                self.blocks[blocks[head][i // self.page_size], i % self.page_size] = span
            lengths[head] += count
        self.tables[commit.slot] = blocks, lengths

    def _check_whole(self, blocks: list[list[int]], span: tuple[int, int]) -> None:
        """What was quantised is all there, in each head."""
        for held in blocks:
            assert len(held) * self.page_size == span[1] - span[0], "a quantised span has lost entries"
            assert all(self.blocks[block, i] == span for block in held for i in range(self.page_size))

    def _replace(self, commit, span: tuple[int, int], blocks: list[list[int]]) -> None:
        """A fold goes where its span stood whole; what stands before and behind it stays."""
        growth, (after, lengths) = commit.growth, commit.table
        places = [start // self.page_size for start in growth.starts]
        length = (span[1] - span[0]) // self.page_size
        self._check_whole([held[at : at + length] for held, at in zip(blocks, places, strict=True)], span)
        for held, at, new, now in zip(blocks, places, growth.new_blocks, after, strict=True):
            assert now == held[:at] + new + held[at + length :], "another summary than planned"
            self.blocks |= {(block, i): span for block in new for i in range(self.page_size)}
        assert lengths == [len(held) * self.page_size for held in after]
        self.tables[commit.slot] = [list(held) for held in after], list(lengths)

    def _compute(self, row: BatchRow) -> tuple:
        """Write the row's entries; what it then sees raw, checked against what its branch says it is."""
        branch, ids = self._owner(row.slot), [self.drawn[row.slot]] if row.from_slot else row.token_ids
        for i, token in enumerate(ids):
            page, offset = divmod(row.kv_start + i, self.page_size)
            self.pages[row.pages[page], offset] = row.position + i, token
        if row.keep_queries:
            kept = self.queries.setdefault(row.slot, {})
            for position in [p for p in kept if p >= row.position]:
                del kept[position]
            kept |= {row.position + i: t for i, t in enumerate(ids) if row.position + i >= row.queries_from}
        length = row.kv_start + len(ids)
        raw = tuple(self.pages[row.pages[i // self.page_size], i % self.page_size] for i in range(length))
        if branch is not None:
            self._check(branch, row, raw, row.position + len(ids))
        return raw

    def _owner(self, slot: int) -> Branch | None:
        """Whose slot it is; None for work ahead of a request."""
        return next((b for b in (*self.scheduler.running, *self.scheduler.sides) if b.slot == slot), None)

    def _check(self, branch: Branch, row: BatchRow, raw: tuple, end: int) -> None:
        """The row sees each position before `end` once: raw, in a summary, or not at all if folding has taken it."""
        known = [*branch.token_ids, self.drawn.get(row.slot)]
        assert all(known[position] == token for position, token in raw), "a row sees a token that is not its own"
        spans, seen = self._spans(row.slot), [position for position, _ in raw]
        hidden = {position for start, stop in spans for position in range(start, stop)}
        if row.num_tokens == 1 and seen[-1] in hidden:  # forked behind a fold, its last token is asked again
            seen.pop()
        assert seen == sorted(set(seen)), "raw entries are out of order"
        assert not hidden & set(seen), "a position is there raw and folded"
        table = branch.table.summary
        blocks, lengths = self.tables.get(row.slot, ([], []))
        assert lengths == table.lengths or (not any(lengths) and not any(table.lengths)), "another summary than planned"
        assert blocks == table.blocks or (not any(blocks) and not any(table.blocks)), "other head blocks than planned"
        if branch.folding is not None:
            taken = {p for start, stop in branch.folding.folded for p in range(start, stop)}
            assert hidden <= taken, "a summary stands for what nobody has folded"
            assert taken | set(seen) == set(range(end)), "a position is lost"

    def _spans(self, slot: int) -> list[tuple[int, int]]:
        """What the slot's summary entries stand for, equal in all heads."""
        blocks, lengths = self.tables.get(slot, ([], []))
        heads = [
            [self.blocks[held[i // self.page_size], i % self.page_size] for i in range(length)]
            for held, length in zip(blocks, lengths, strict=True)
        ]
        assert all(head == heads[0] for head in heads), "heads have different summaries"
        return list(dict.fromkeys(heads[0])) if heads else []

    def _check_queries(self, slot: int, now: Mapping[int, int]) -> None:
        """A fold is judged by what came after it: every position since the prompt is there."""
        branch = self._owner(slot)
        assert branch is not None and branch.folding is not None, "a fold of nobody"
        end, known = now.get(slot, branch.num_computed_tokens), [*branch.token_ids, self.drawn.get(slot)]
        kept = {p: token for p, token in self.queries.get(slot, {}).items() if p < end}
        assert all(known[position] == token for position, token in kept.items()), "queries of another past"
        assert set(kept) >= set(range(branch.num_prompt_tokens, end)), "queries are missing"

    def _sample(self, row: BatchRow, sample: SampleRow, raw: tuple) -> int:
        counted = self.counted.get(sample.slot, [])
        if sample.history is not None:
            counted = list(sample.history[1])
        if sample.params.presence_penalty:
            branch = self._owner(sample.slot)
            assert branch is not None
            own = branch.output_ids
            inflight = sample.position - branch.num_prompt_tokens - len(own)
            assert counted[: len(own)] == own and len(counted) == len(own) + inflight, "penalties count other tokens"
        token = -1 if self.rng.random() < self.bad / 200 else self.draw(sample, raw, tuple(self._spans(row.slot)))
        self.drawn[sample.slot] = token
        self.counted[sample.slot] = [*counted, token]
        return token

    def _read(self, pages: list[int]) -> list[tuple[int, int]]:
        return [self.pages[page, offset] for page in pages for offset in range(self.page_size)]


def _move(pairs, source, target, size):
    """Copy whole pages or blocks, all read before any is written."""
    read = [[source.get((a, offset)) for offset in range(size)] for a, _ in pairs]
    for (_, b), entries in zip(pairs, read, strict=True):
        for offset, entry in enumerate(entries):
            target.pop((b, offset), None)
            if entry is not None:
                target[b, offset] = entry
