"""All memory of the branches on one device, and the memory work of a step in its order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from thinkfold.attention import int4 as four_bits
from thinkfold.config import EngineConfig
from thinkfold.fold import gate
from thinkfold.fold.budgets import BUDGETS_FILE, FoldBudgets
from thinkfold.runner.attention_facts import attention_facts
from thinkfold.runner.faults import is_device_fault
from thinkfold.runner.folder import Folder
from thinkfold.runner.loader import LoadedModel, pick_attention
from thinkfold.runner.query_store import QueryStore
from thinkfold.runner.shard import OwnHeads
from thinkfold.runner.storage import KVStorage, page_bytes
from thinkfold.runner.summary_tables import SummaryTables
from thinkfold.runner.tensor_parallel import heads_of
from thinkfold.runner.transfer import to_device
from thinkfold.scheduler.output import MemoryWork

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FoldNews:
    """What a step's folds came to: what was raised, by fold id, and what the device has yet to say.

    `results` `[folds + others, 2]` are of `folds`, whose error was estimated, and then of `others`, which another rank
    may have failed: the error, and on how many ranks something was raised.
    """

    folds: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    results: Tensor | None = None
    faults: list[tuple[int, str]] = field(default_factory=list)

    def told(self, results: Sequence[Sequence[float]]) -> tuple[list[tuple[int, float]], list[tuple[int, str]]]:
        """Errors and faults by fold id, when `results` have come home."""
        rows = list(zip([*self.folds, *self.others], results, strict=True))
        known, failed = {fold_id for fold_id, _ in self.faults}, {fold_id for fold_id, (_, ranks) in rows if ranks}
        errors = [(fold_id, error) for fold_id, (error, _) in rows[: len(self.folds)] if fold_id not in failed]
        return errors, self.faults + [(fold_id, "on another rank, see its log") for fold_id in sorted(failed - known)]


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
        self._shard, blocks = loaded.shard, four_bits.page_blocks(*self._shape) if self._int4 else 0
        self._own = OwnHeads(self._shard, layers, heads, blocks or layers * heads)
        self.budgets = replace(budgets, page_blocks=blocks * self._shard.size)
        self._facts = attention_facts(loaded)
        self._backend = pick_attention(config.attention_backend, device)
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

    def make_kernels(self) -> None:
        """Compile what folds launch now, so that none waits for it; call `reserve` before."""
        self._folder.make_kernels()

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
        self._folder = Folder(
            self.storage, self.tables, self.queries, self.budgets, self._facts, self._own, self._backend
        )

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie that a captured step reads and writes."""
        storage, tables = self.storage, self.tables
        kept = (storage.tensor, storage.scales, storage.bias, tables.table, tables.lens, *self.queries.reserve())
        return tuple(tensor.data_ptr() for tensor in kept)

    def execute(self, work: MemoryWork, now: Mapping[int, int]) -> FoldNews:
        """Do a step's memory work; `now` gives the logical position that a slot's row computes next.

        Of several ranks each does the work of its own heads. A fold that raises is told in the news and harms nobody
        else; a fault of the device is raised.
        """
        news, work = FoldNews(), self._own.work(work)
        for slot, key in work.queries_kept:
            self.queries.save(slot, key, leave=False)
        if work.queries_out or work.swap_out or work.blocks_out:
            self._leave(work)
        for fold_id in work.dropped:
            self._folder.drop(fold_id)
        for commit in work.commits:
            with _noted(news, commit.fold_id):
                self._folder.commit(commit)
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
        prepared: dict[int, Tensor] = {}
        for prepare in work.prepares:
            with _noted(news, prepare.fold_id):
                prepared[prepare.fold_id] = self._folder.prepare(prepare, now.get(prepare.slot))
        self._judge(news, work, prepared)
        return news

    def check_integrity(self) -> None:
        """Raise AssertionError unless summary tables and kept queries are sound. Waits for a GPU."""
        self.tables.check_integrity()
        self.queries.check_integrity()

    def _judge(self, news: FoldNews, work: MemoryWork, prepared: Mapping[int, Tensor]) -> None:
        """Errors of prepared folds, from the squares of all ranks' heads, and what some rank has failed to do."""
        if self._shard.alone:
            news.folds = list(prepared)
            if prepared:
                errors = gate.error_of(torch.stack(list(prepared.values())))
                news.results = torch.stack([errors, torch.zeros_like(errors)], 1)
            return
        news.folds = [prepare.fold_id for prepare in work.prepares]
        news.others = [commit.fold_id for commit in work.commits]
        if not (news.folds or news.others):
            return
        failed = {fold_id for fold_id, _ in news.faults}
        nothing = torch.zeros(self._shape[0], 2, device=self._device)
        squares = [prepared.get(fold_id, nothing).float() for fold_id in news.folds] + [nothing] * len(news.others)
        (faults,) = to_device([[[fold_id in failed] for fold_id in (*news.folds, *news.others)]], self._device)
        rows = torch.cat([torch.stack(squares).flatten(1), faults.float()], 1)
        self._shard.sum_(rows)
        errors = gate.error_of(rows[:, :-1].unflatten(1, (-1, 2)))
        news.results = torch.stack([errors, rows[:, -1]], 1)

    def _leave(self, work: MemoryWork) -> None:
        for slot, key in work.queries_out:
            self.queries.save(slot, key)
        if work.swap_out:
            self.storage.pages_out(work.swap_out)
        if work.blocks_out:
            self.storage.blocks_out(work.blocks_out)


@contextmanager
def _noted(news: FoldNews, fold_id: int) -> Iterator[None]:
    """What a fold raises is news: one branch's has failed; with the device itself, everybody's has."""
    try:
        yield
    except Exception as error:
        if is_device_fault(error):
            raise
        logger.exception("a fold has failed")
        news.faults.append((fold_id, f"{type(error).__name__}: {error}"))


def fold_budgets(loaded: LoadedModel) -> FoldBudgets:
    """The budget table that lies beside the model, else a uniform one.

    It counts the KV heads of all ranks; what several of them hold counts as often. Raises ParameterError for a table
    that is broken or another model's.
    """
    beside, (_, kv_heads) = Path(loaded.model.name_or_path or "") / BUDGETS_FILE, heads_of(loaded.model.config)
    budgets = FoldBudgets.load(beside if beside.is_file() else None, loaded.num_layers, kv_heads)
    return budgets.repeated(loaded.num_kv_heads * loaded.shard.size // kv_heads)
