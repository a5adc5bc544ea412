"""All memory of the branches on one device, and the memory work of a step in its order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from thinkfold.attention import int4 as four_bits
from thinkfold.config import EngineConfig
from thinkfold.fold.budgets import BUDGETS_FILE, FoldBudgets
from thinkfold.runner.attention_facts import attention_facts
from thinkfold.runner.faults import is_device_fault
from thinkfold.runner.folder import Folder
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.query_store import QueryStore
from thinkfold.runner.storage import KVStorage, page_bytes
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.scheduler.output import MemoryWork

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FoldNews:
    """What a step's folds came to: (fold id, estimated error, 0-d), and (fold id, what was raised)."""

    errors: list[tuple[int, Tensor]] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)


class DeviceMemory:
    """KV pages, summary tables and kept queries of one device, and what folds do between them.

    `budgets` count entries as summaries are stored here.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        budgets: FoldBudgets,
        max_model_len: int,
        dtype: torch.dtype,
        num_pages: int,
        host_pages: int = 0,
    ) -> None:
        layers, heads, page_size = loaded.num_layers, loaded.num_kv_heads, config.page_size
        device, slots = loaded.device, config.max_num_seqs
        self._shape = (layers, heads, page_size, loaded.head_dim, dtype)
        self._device = device
        self._int4 = config.fold_storage == "int4"
        self._with_bias = any(budgets.mass) and not self._int4
        self._reserved = False
        self.tables = SummaryTables(slots, layers, heads, page_size, -(-max_model_len // page_size), device)
        self.queries = QueryStore(slots, layers, loaded.num_heads, loaded.head_dim, loaded.dtype, device)
        blocks = four_bits.page_blocks(*self._shape) if self._int4 else 0
        self.budgets, self._facts = replace(budgets, page_blocks=blocks), attention_facts(loaded)
        self.window = self._facts.window
        self.resize(num_pages, host_pages)

    @property
    def page_bytes(self) -> int:
        return page_bytes(*self._shape, bias=self._with_bias)

    @property
    def later_bytes(self) -> int:
        """Bytes that the first fold will allocate on the device beside the pool."""
        return 0 if self._reserved else self.queries.nbytes + self.tables.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes beside the pool that `reserve` has taken on the device."""
        if not self._reserved:
            return 0
        return sum(tensor.nbytes for tensor in (self.tables.table, self.tables.lens, *self.queries.reserve()))

    def reserve(self) -> None:
        """Allocate now all that folds may ever need, so that no tensor is replaced later; call `resize` after it."""
        self._reserved, self._with_bias = True, not self._int4
        self.tables.reserve()
        self.queries.reserve()

    def resize(self, num_pages: int, host_pages: int = 0) -> None:
        """Pages of another number; what they held is lost."""
        layers, heads, page_size, head_dim, dtype = self._shape
        self.storage = KVStorage(
            num_pages,
            layers,
            heads,
            page_size,
            head_dim,
            dtype,
            self._device,
            host_pages,
            bias=self._with_bias,
            int4=self._int4,
        )
        self._folder = Folder(self.storage, self.tables, self.queries, self.budgets, self._facts)

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie that a captured step reads and writes."""
        storage, tables = self.storage, self.tables
        kept = (storage.tensor, storage.scales, storage.bias, tables.table, tables.lens, *self.queries.reserve())
        return tuple(tensor.data_ptr() for tensor in kept)

    def execute(self, work: MemoryWork, now: Mapping[int, int]) -> FoldNews:
        """Do a step's memory work; `now` gives the logical position that a slot's row computes next.

        A fold that raises is told in the news and harms nobody else; a fault of the device is raised.
        """
        news = FoldNews()
        for slot, key in work.queries_kept:
            self.queries.save(slot, key, leave=False)
        if work.queries_out or work.swap_out or work.blocks_out:
            self._leave(work)
        for fold_id in work.dropped:
            self._folder.drop(fold_id)
        for commit in work.commits:
            try:
                self._folder.commit(commit)
            except Exception as error:
                _note(news, commit.fold_id, error)
        if work.copies:
            self.storage.copy_pages(work.copies)
        if work.swap_in:
            self.storage.pages_in(work.swap_in)
        if work.blocks_in:
            self.storage.blocks_in(work.blocks_in)
        for source, target in work.queries_shared:
            self.queries.share(source, target)
        for slot, blocks, lengths in work.summaries:
            self.tables.set(slot, blocks, lengths)
            self.queries.forget(slot)
        for slot, blocks, lengths in work.adopted:
            self.tables.set(slot, blocks, lengths)
        for source, target in work.forks:
            self.queries.fork(source, target)
        for key, slot in work.queries_in:
            self.queries.restore(key, slot)
        for key in work.queries_dropped:
            self.queries.discard(key)
        for prepare in work.prepares:
            try:
                news.errors.append((prepare.fold_id, self._folder.prepare(prepare, now.get(prepare.slot))))
            except Exception as error:
                _note(news, prepare.fold_id, error)
        return news

    def check_integrity(self) -> None:
        """Raise AssertionError unless summary tables and kept queries are sound. Waits for a GPU."""
        self.tables.check_integrity()
        self.queries.check_integrity()

    def _leave(self, work: MemoryWork) -> None:
        for slot, key in work.queries_out:
            self.queries.save(slot, key)
        if work.swap_out:
            self.storage.pages_out(work.swap_out)
        if work.blocks_out:
            self.storage.blocks_out(work.blocks_out)


def _note(news: FoldNews, fold_id: int, error: Exception) -> None:
    """One branch's fold has failed; with the device itself, everybody has."""
    if is_device_fault(error):
        raise error
    logger.exception("a fold has failed")
    news.faults.append((fold_id, f"{type(error).__name__}: {error}"))


def fold_budgets(loaded: LoadedModel) -> FoldBudgets:
    """The budget table that lies beside the model, else a uniform one.

    Raises ParameterError for a table that is broken or another model's.
    """
    beside = Path(loaded.model.name_or_path or "") / BUDGETS_FILE
    return FoldBudgets.load(beside if beside.is_file() else None, loaded.num_layers, loaded.num_kv_heads)
