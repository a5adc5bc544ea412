"""A device of integers under a KVManager, and what each branch must read back from it.

Contents are markers, one per head and entry. A step does its memory work in the order of
`MemoryWork` and then its rows; after each the whole memory of every branch is read back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from thinkfold.kv.manager import KVManager
from thinkfold.kv.pages import PageClass
from thinkfold.kv.summary import SummaryGrowth
from thinkfold.kv.table import PageTable
from thinkfold.kv.work import KVWork

SIZE, HEADS = 4, 3
Marker = tuple[object, ...]
Memory = dict[int, list[Marker | None]]  # block: its entries; page p is `page_blocks` of them


@dataclass(eq=False)
class Model:
    """One branch: its table, and the markers that it must read."""

    table: PageTable
    namespace: tuple[str, ...]
    prompt: list[int]
    raw: list[Marker]
    summary: list[list[Marker]] = field(default_factory=lambda: [[] for _ in range(HEADS)])
    slot: tuple[list[list[int]], list[int]] = field(default_factory=lambda: ([[] for _ in range(HEADS)], [0] * HEADS))
    written: int = 0  # leading raw entries that finished steps have written
    offloaded: list[Marker] = field(default_factory=list)
    parts: list[tuple[bool, list[int]]] = field(default_factory=list)  # of the summary: kept whole, entries by head


@dataclass
class Commit:
    model: Model
    sources: list[list[tuple[int, int]]]  # by head: (block, offset) of each entry to keep
    growth: SummaryGrowth
    table: tuple[list[list[int]], list[int]] | None = None  # the whole tables after it, if it replaced something


@dataclass
class Row:
    model: Model
    pages: list[int]  # the table's own list, as in BatchRow
    start: int
    markers: list[Marker]


@dataclass
class Step:
    number: int
    commits: list[Commit] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)  # the rows' pages when it was launched
    used: set[int] = field(default_factory=set)  # device head blocks that it reads or writes


class Machine:
    """Random operations as a scheduler may order them, at pipeline depth 0 or 1.

    A page has `page_blocks`: raw entries of head h lie in the h-th, summaries in any.
    """

    def __init__(
        self, seed: int, depth: int, *, num_pages: int, reserve: int, host: int, page_blocks: int = HEADS
    ) -> None:
        self.page_blocks = page_blocks
        self.rng = random.Random(seed)
        self.depth = depth
        self.kv = KVManager(
            num_pages,
            SIZE,
            enable_prefix_caching=True,
            num_heads=HEADS,
            page_blocks=page_blocks,
            reserve_pages=reserve,
            host_pages=host,
        )
        self.device: Memory = {b: [None] * SIZE for b in range(num_pages * page_blocks)}
        self.host: Memory = {b: [None] * SIZE for b in range(host * page_blocks)}
        self.models: list[Model] = []
        self.busy: set[Model] = set()  # with a row in the step being planned, or forked from one
        self.flight: list[Step] = []
        self.plan = Step(0)
        self.done: Counter[str] = Counter()
        self._marker = 0

    # -- operations ---------------------------------------------------------------------------

    def new(self) -> None:
        stem = self.rng.randrange(3) * 100
        prompt = [*range(stem, stem + self.rng.randrange(1, 18)), self.rng.randrange(4)]
        model = Model(PageTable(), (f"tenant={self.rng.randrange(2)}",), prompt, [])
        found = self.kv.match(model.table, model.namespace, prompt, len(prompt) - 1)
        model.raw = [self.prompt_marker(model, i) for i in range(found)]
        model.written = found
        if self.row(model, len(prompt) - found, PageClass.PROMPT):
            self.models.append(model)
            self.done["hit"] += found > 0
        else:
            self.kv.free(model.table)

    def grow(self) -> None:
        if model := self.pick(on_device=True):
            self.row(
                model, self.rng.choice((1, 1, 1, 2, 5, 9)), self.rng.choice((PageClass.THINKING, PageClass.ANSWER))
            )

    def fork(self) -> None:
        model = self.pick(on_device=True, busy=True)
        if model is None or not model.raw:
            return
        low = max(1, model.table.last_gap * SIZE)
        if low > len(model.raw):
            return
        entries = self.rng.randint(low, len(model.raw))
        child = Model(PageTable(), model.namespace, model.prompt, model.raw[:entries])
        child.written = min(model.written, entries)
        child.summary = [list(markers) for markers in model.summary]
        child.parts = model.parts
        self.kv.fork(model.table, child.table, entries)
        child.slot = (child.table.summary.blocks or [[]] * HEADS, child.table.summary.lengths or [0] * HEADS)
        self.models.append(child)
        if model in self.busy:
            self.busy.add(child)
        self.done["fork"] += 1

    def fold(self) -> None:
        if (found := self.span()) is None:
            return
        model, first, count = found
        markers = model.raw[first * SIZE : (first + count) * SIZE]
        pages = model.table.pages[first : first + count]
        full, whole = self.page_blocks > HEADS, self.page_blocks > HEADS and self.rng.random() < 0.5
        counts = [self.rng.randint(0, len(markers)) for _ in range(HEADS)]
        if full:
            counts = [count // SIZE * SIZE for count in counts]
        if self.rng.random() < 0.3:
            counts = [0] * HEADS
        if whole:
            counts = [len(markers)] * HEADS
        chosen = [sorted(self.rng.sample(range(len(markers)), n)) for n in counts]
        free, before = self.kv.num_available, self.state(model)
        growth = self.new_pages(lambda: self.kv.fold(model.table, first, count, counts))
        if growth is None:
            assert self.state(model) == before, "a fold that failed has changed something"
            self.done["fold refused"] += 1
            return
        first_block = [[page * self.page_blocks + head for page in pages] for head in range(HEADS)]
        sources = [[(mine[i // SIZE], i % SIZE) for i in kept] for mine, kept in zip(first_block, chosen, strict=True)]
        model.parts = [*model.parts, (whole, counts)]
        self.plan.commits.append(Commit(model, sources, growth))
        for head, kept in enumerate(chosen):
            model.summary[head] += [markers[i] for i in kept]
        self.cut(model, first, count)
        self.done["fold"] += 1
        self.done["fold without a free page"] += free == 0 and any(counts)
        self.done["block copy"] += len(growth.copies)

    def refold(self) -> None:
        """Fold what was kept whole, somewhere in the summary, to fewer full blocks."""
        model = self.pick(on_device=True)
        known = [i for i, (whole, _) in enumerate(model.parts) if whole] if model else []
        if model is None or not known:
            return
        at = self.rng.choice(known)
        before = [sum(counts[head] for _, counts in model.parts[:at]) for head in range(HEADS)]
        length = model.parts[at][1][0]
        counts = [self.rng.randrange(length // SIZE + 1) * SIZE for _ in range(HEADS)]
        chosen = [sorted(self.rng.sample(range(length), n)) for n in counts]
        blocks = [held[n // SIZE :] for held, n in zip(model.table.summary.blocks, before, strict=True)]
        places, old = [n // SIZE for n in before], self.state(model)
        growth = self.new_pages(lambda: self.kv.refold(model.table, places, length // SIZE, counts))
        if growth is None:
            assert self.state(model) == old, "a fold that failed has changed something"
            self.done["refold refused"] += 1
            return
        sources = [[(held[i // SIZE], i % SIZE) for i in kept] for held, kept in zip(blocks, chosen, strict=True)]
        table = (model.table.summary.blocks, model.table.summary.lengths)
        self.plan.commits.append(Commit(model, sources, growth, table))
        for head, (start, kept) in enumerate(zip(before, chosen, strict=True)):
            markers = model.summary[head]
            markers[start : start + length] = [markers[start + i] for i in kept]
        model.parts = [*model.parts[:at], (False, counts), *model.parts[at + 1 :]]
        self.done["refold"] += 1

    def drop(self) -> None:
        if found := self.span():
            self.kv.drop_pages(found[0].table, *found[1:])
            self.cut(*found)
            self.done["drop"] += 1

    def offload(self) -> None:
        if (found := self.span()) is None:
            return
        model, first, count = found
        before = self.state(model)
        if self.kv.offload(model.table, first, count):
            model.offloaded += model.raw[first * SIZE : (first + count) * SIZE]
            self.cut(model, first, count)
            self.done["offload"] += 1
        else:
            assert self.state(model) == before

    def swap_out(self) -> None:
        if model := self.pick(on_device=True):
            before = self.state(model)
            if self.kv.swap_out(model.table):
                self.done["swap out"] += 1
                self.done["swap out of a summary"] += any(model.summary)
            else:
                assert self.state(model) == before, "a swap-out that failed has changed something"
                self.done["swap out refused"] += 1

    def swap_in(self) -> None:
        model = self.pick(on_device=False)
        if model is None:
            return
        headroom, before = self.rng.randrange(3), self.state(model)
        if self.new_pages(lambda: self.kv.swap_in(model.table, headroom)):
            assert self.kv.num_available >= headroom
            model.slot = (model.table.summary.blocks or [[]] * HEADS, model.table.summary.lengths or [0] * HEADS)
            self.done["swap in"] += 1
        else:
            assert self.state(model) == before

    def publish(self) -> None:
        if model := self.pick(on_device=True):
            self.kv.publish(model.table, model.namespace, model.prompt, min(model.written, len(model.prompt)))
            self.done["publish"] += 1

    def rewind(self) -> None:
        if model := self.pick():
            entries = self.rng.randint(model.table.last_gap * SIZE, len(model.raw))
            if self.rng.random() < 0.7:
                entries = max(entries, len(model.raw) - 2)
            self.kv.rewind(model.table, entries)
            del model.raw[entries:]
            model.written = min(model.written, entries)
            self.done["rewind"] += 1

    def free(self) -> None:
        model = self.pick() or self.pick(on_device=False)
        if model is not None:
            self.done["free on the host"] += model.table.swapped
            self.kv.free(model.table)
            if self.rng.random() < 0.3:
                self.kv.free(model.table)
            self.models.remove(model)
            self.done["free"] += 1

    def clear(self) -> None:
        if self.rng.random() < 0.05:
            self.kv.clear_cache()

    # -- steps --------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the plan if it has something to do, then collect down to the depth."""
        if self.plan.rows or self.plan.commits or self.kv.has_work:
            self.run_plan()
        if self.flight and (len(self.flight) > self.depth or self.rng.random() < 0.2):
            self.finish()

    def run_plan(self) -> None:
        step, work = self.plan, self.kv.take_work()
        self.kv.launch_step(step.number)
        self.check_work(step, work)
        for source, target in work.swap_out:
            self.copy(self.device, self.blocks_of(source), self.host, self.blocks_of(target))
        for source, target in work.blocks_out:
            self.copy(self.device, [source], self.host, [target])
        for commit in step.commits:
            self.commit(step, commit)
        for source, target in work.copies:
            self.copy(self.device, self.blocks_of(source), self.device, self.blocks_of(target))
        for source, target in work.swap_in:
            self.copy(self.host, self.blocks_of(source), self.device, self.blocks_of(target))
        for source, target in work.blocks_in:
            self.copy(self.host, [source], self.device, [target])
        for row in step.rows:
            for i, marker in enumerate(row.markers, row.start):
                for block in self.blocks_of(row.pages[i // SIZE]):
                    self.device[block][i % SIZE] = marker
        pages = {p for pair in work.copies for p in pair} | {p for p, _ in work.swap_out} | {p for _, p in work.swap_in}
        step.used |= {b for page in pages for b in self.blocks_of(page)}
        step.used |= {b for b, _ in work.blocks_out} | {b for _, b in work.blocks_in}
        step.used |= self.held_blocks([m.table for m in self.models])
        step.seen = [list(row.pages) for row in step.rows]
        self.flight.append(step)
        self.plan = Step(step.number + 1)
        self.busy.clear()
        self.check()

    def finish(self) -> None:
        step = self.flight.pop(0)
        for row, seen in zip(step.rows, step.seen, strict=True):
            assert row.pages[: len(seen)] == seen, "a planned row's pages have changed under it"
            if row.start <= row.model.written:
                end = min(row.start + len(row.markers), len(row.model.raw))
                if row.model.raw[row.start : end] == row.markers[: end - row.start]:
                    row.model.written = max(row.model.written, end)
        self.kv.finish_step(step.number)

    def commit(self, step: Step, commit: Commit) -> None:
        growth, (blocks, lengths) = commit.growth, commit.model.slot
        blocks = [list(b) for b in blocks]
        if commit.table is None:
            assert lengths == growth.starts, "a fold does not start where the slot's summary ends"
        for head, source, target in growth.copies:
            self.copy(self.device, [source], self.device, [target])
            assert blocks[head][growth.starts[head] // SIZE] == source
            blocks[head][growth.starts[head] // SIZE] = target
            step.used |= {source, target}
        if commit.table is None:
            blocks = [held + new for held, new in zip(blocks, growth.new_blocks, strict=True)]
            lengths = [s + c for s, c in zip(lengths, growth.counts, strict=True)]
        else:
            blocks, lengths = commit.table
        for head, kept in enumerate(commit.sources):
            assert len(kept) == growth.counts[head]
            entries = [self.device[block][offset] for block, offset in kept]
            for i, entry in enumerate(entries, growth.starts[head]):
                self.device[blocks[head][i // SIZE]][i % SIZE] = entry
                step.used.add(blocks[head][i // SIZE])
            step.used |= {block for block, _ in kept}
        commit.model.slot = (blocks, lengths)

    def copy(self, source: Memory, froms, target: Memory, tos) -> None:
        for a, b in zip(froms, tos, strict=True):
            target[b] = list(source[a])

    def blocks_of(self, page: int) -> range:
        return range(page * self.page_blocks, (page + 1) * self.page_blocks)

    def held_blocks(self, tables: list[PageTable]) -> set[int]:
        raw = {block for t in tables for page in t.pages for block in self.blocks_of(page)}
        return raw | {block for t in tables for blocks in t.summary.blocks for block in blocks}

    # -- checks -------------------------------------------------------------------------------

    def check_work(self, step: Step, work: KVWork) -> None:
        """Copies of one kind may be done in any order, so no place may be in two of them."""
        pages = [t for _, t in work.copies + work.swap_in]
        written = [b for page in pages for b in self.blocks_of(page)] + [b for _, b in work.blocks_in]
        folded = {b for c in step.commits for blocks in c.growth.new_blocks for b in blocks}
        folded |= {target for c in step.commits for _, _, target in c.growth.copies}
        assert len(set(written)) == len(written), "two pieces of work write to one place"
        assert not folded & set(written), "a fold and a copy write to one place"
        assert not {s for s, _ in work.copies} & set(pages), "a copy reads what the step has yet to write"
        left = {b for page, _ in work.swap_out for b in self.blocks_of(page)} | {b for b, _ in work.blocks_out}
        assert not left & (set(written) | folded), "a place that is swapped out is used again in the same step"
        for places in (work.swap_out, work.blocks_out):
            assert len({t for _, t in places}) == len(places), "two things are swapped out to one place"

    def check(self) -> None:
        """Every branch reads back exactly its own entries."""
        self.kv.check_integrity(m.table for m in self.models)
        for model in self.models:
            table, host = model.table, model.table.host
            memory = self.device if host is None else self.host
            pages = table.pages if host is None else host.pages
            blocks = table.summary.blocks if host is None else host.blocks
            assert table.kv_len == len(model.raw)
            for head in range(HEADS):
                read = [m for page in pages for m in memory[page * self.page_blocks + head]][: len(model.raw)]
                assert read == model.raw, "a branch reads raw entries that are not its own"
                if table.summary.lengths:
                    length = table.summary.lengths[head]
                    read = [m for block in blocks[head] for m in memory[block]][:length]
                    assert read == model.summary[head], "a branch reads a summary that is not its own"
                else:
                    assert not model.summary[head]
            if host is None and table.summary.lengths:
                assert (table.summary.blocks, table.summary.lengths) == model.slot, "growth and table disagree"
            read = [m for page in table.offload_pages for m in self.host[page * self.page_blocks]]
            assert read == model.offloaded
            assert table.offloaded * SIZE == len(model.offloaded)

    # -- helpers ------------------------------------------------------------------------------

    def state(self, model: Model) -> tuple[object, ...]:
        """All that a refused operation must leave as it was (idle cached pages may have gone)."""
        t, kv = model.table, self.kv
        host = None if t.host is None else (t.host.pages, t.host.blocks)
        held = sum(n for c, n in kv.usage().items() if c is not PageClass.CACHED)
        summary = ([list(b) for b in t.summary.blocks], list(t.summary.lengths))
        return list(t.pages), t.kv_len, summary, host, list(t.gaps), t.offloaded, held, kv.host_usage()

    def pick(self, *, on_device: bool | None = None, busy: bool = False) -> Model | None:
        fits = [
            m
            for m in self.models
            if (busy or m not in self.busy) and (on_device is None or m.table.swapped is not on_device)
        ]
        return self.rng.choice(fits) if fits else None

    def span(self) -> tuple[Model, int, int] | None:
        """Full pages behind the prompt of some branch."""
        model = self.pick(on_device=True)
        if model is None:
            return None
        low, high = -(-len(model.prompt) // SIZE), len(model.raw) // SIZE
        if high <= low:
            return None
        first = self.rng.choice((low, max(low, model.table.last_gap), self.rng.randrange(low, high)))
        return (model, first, self.rng.randint(1, high - first)) if first < high else None

    def cut(self, model: Model, first: int, count: int) -> None:
        del model.raw[first * SIZE : (first + count) * SIZE]
        model.written = min(model.written, first * SIZE)

    def row(self, model: Model, count: int, page_class: PageClass) -> bool:
        held = len(model.table.pages)
        if not self.new_pages(lambda: self.kv.allocate(model.table, count, page_class), model.table):
            return False
        start = len(model.raw)
        assert model.table.kv_len == start
        taken = len(model.table.pages) > held
        assert not taken or self.kv._pool.num_free >= self.kv.reserve_pages, "raw entries got a page of the reserve"
        markers = [self.next_marker(model, i) for i in range(start, start + count)]
        self.plan.rows.append(Row(model, model.table.pages, start, markers))
        model.raw += markers
        model.table.kv_len += count
        self.busy.add(model)
        self.done["row"] += 1
        return True

    def new_pages(self, act, table: PageTable | None = None):
        """Do `act`; no page that it takes may be in use by a step in flight."""
        tables = [m.table for m in self.models] + ([table] if table else [])
        before = self.held_blocks(tables)
        result = act()
        taken = self.held_blocks(tables) - before
        for step in self.flight:
            assert not taken & step.used, "a place was handed on that a step in flight uses"
        return result

    def next_marker(self, model: Model, index: int) -> Marker:
        if index < len(model.prompt):
            return self.prompt_marker(model, index)
        self._marker += 1
        return ("unique", self._marker)

    def prompt_marker(self, model: Model, index: int) -> Marker:
        return (model.namespace, tuple(model.prompt[: index + 1]))
