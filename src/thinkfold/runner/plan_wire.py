"""A step's plan as bytes for the other ranks: what is drawn stays with rank 0, and of page tables only news travel."""

from __future__ import annotations

import pickle

from thinkfold.scheduler.output import BatchRow, SampleRow, StepPlan
from thinkfold.types import SamplingParams

_NOBODYS = SamplingParams()


class PlanWriter:
    """Writes plans, in order, for a `PlanReader`.

    A list of pages is only ever appended to, and any other change puts a new list in its place
    (`kv.table.PageTable`): of a known list the reader has the first pages already.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], int]] = {}

    def write(self, plan: StepPlan) -> bytes:
        """The plan without parameters of draws."""
        return pickle.dumps((plan.step, [self._row(row) for row in plan.rows], plan.memory), pickle.HIGHEST_PROTOCOL)

    def _row(self, row: BatchRow) -> tuple[BatchRow, list[int], int]:
        """The row with its new pages only, the slots of its samples, and how many pages are known."""
        held, count = self._known.get(row.slot, ([], 0))
        if held is not row.pages:
            count = 0
        self._known[row.slot] = row.pages, len(row.pages)
        new = BatchRow(
            row.slot,
            row.token_ids,
            row.from_slot,
            row.position,
            row.kv_start,
            row.pages[count:],
            keep_queries=row.keep_queries,
            queries_from=row.queries_from,
        )
        return new, [sample.slot for sample in row.samples], count


class PlanReader:
    """Reads what a `PlanWriter` has written. A list of pages that grows is the same list in the next plan."""

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}

    def read(self, data: bytes) -> StepPlan:
        """A plan whose samples have nothing but a slot."""
        step, rows, memory = pickle.loads(data)
        for row, slots, count in rows:
            if count:
                held = self._known[row.slot]
                held += row.pages
                row.pages = held
            self._known[row.slot] = row.pages
            row.samples = [SampleRow(slot, _NOBODYS, seed=0, branch=0, position=0) for slot in slots]
        return StepPlan(step, [row for row, _, _ in rows], memory)
