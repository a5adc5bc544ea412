"""Kept states of branches: how they are made, found, and how they end. Bounded in number and in time."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from thinkfold.control.parts import PartControl
from thinkfold.engine.running import Running
from thinkfold.errors import ConflictError, NotFoundError, ParameterError
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.forks import share
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import EngineRequest, Handle

MakeControl = Callable[[EngineRequest, int], PartControl]


@dataclass(slots=True)
class Kept:
    """A handle's branch is parked and never runs itself: others fork from it."""

    handle: Handle
    branch: Branch
    control: PartControl
    expires: float


class Handles:
    """When a new one would be one too many, the one that was not used for longest goes."""

    def __init__(
        self,
        scheduler: Scheduler,
        make_control: MakeControl,
        clock: Callable[[], float],
        *,
        most: int,
        ttl_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._make_control = make_control
        self._clock = clock
        self._most = most
        self._ttl_s = ttl_s
        self._kept: dict[str, Kept] = {}  # the one used last comes last

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, running: Running, branch: Branch, order: int, at: int | None = None) -> Handle:
        """Keep the state after `at` output tokens (None: all). Raises ParameterError, PositionError, ConflictError."""
        position = position_of(branch, at)
        control = self.control_at(running, branch, position)
        kept = Branch(branch.request, branch.index, order, control, branch.token_ids[:position])
        kept.stream = branch.random_stream
        share(self._scheduler.kv, branch, kept, position, redo=False)
        holds = None
        if branch.folding is not None:
            kept.folding = branch.folding.fork(position, control.segment_ends, control.answer_start)
            holds = position - branch.num_prompt_tokens
        self._scheduler.parking.copy_queries(branch, kept)
        self._scheduler.parking.keep(kept)
        name = f"h-{secrets.token_hex(12)}"
        handle = Handle(name, position - branch.num_prompt_tokens, state_hash(kept), self._ttl_s, holds)
        branch.lineage |= {name}
        kept.lineage = branch.lineage
        self._kept[name] = Kept(handle, kept, control, self._clock() + self._ttl_s)
        while len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))
        self._hold()
        return handle

    def use(self, name: str, namespace: tuple[str, ...] | None) -> Kept:
        """A handle of that namespace (None: of any), which lives on. Raises NotFoundError."""
        kept = self._kept.get(name)
        if kept is None or namespace not in (None, kept.branch.request.namespace):
            raise NotFoundError(f"there is no handle {name!r:.100}")
        kept.expires = self._clock() + self._ttl_s
        self._kept[name] = self._kept.pop(name)
        return kept

    def drop(self, name: str, namespace: tuple[str, ...] | None) -> None:
        """Forget a handle; branches that share its state go on. Raises NotFoundError."""
        self.use(name, namespace)
        self._drop(name)
        self._hold()

    def forget(self, labels: tuple[str, ...], session: str = "") -> int:
        """Forget all of namespaces that begin with `labels`, and of that session if one is named; their number."""
        gone = [name for name, kept in self._kept.items() if kept.branch.request.is_of(labels, session)]
        for name in gone:
            self._drop(name)
        self._hold()
        return len(gone)

    def expire(self) -> bool:
        """Forget what nobody has used for its time to live; whether there was any."""
        now = self._clock()
        late = [name for name, kept in self._kept.items() if kept.expires <= now]
        for name in late:
            self._drop(name)
        if late:
            self._hold()
        return bool(late)

    def control_at(self, running: Running, branch: Branch, position: int, *, told: bool = True) -> PartControl:
        """What the branch's control was after `position` tokens; see `PartControl.replay`."""
        control = running.controls[branch.index]
        if told and position == len(branch.token_ids):
            return control.fork(branch.index)
        request = replace(branch.request, until=None)
        fresh = self._make_control(request, branch.index)
        fresh.replay(branch.token_ids[branch.num_prompt_tokens : position], control.forced, told=told)
        return fresh

    def _drop(self, name: str) -> None:
        self._scheduler.finish(self._kept.pop(name).branch)

    def _hold(self) -> None:
        """What a living handle keeps raw is not folded in branches that share it: nothing would be won."""
        for branch in self._scheduler.branches():
            if branch.folding is not None and branch.lineage:
                branch.lineage &= self._kept.keys()
                ends = (len(self._kept[name].branch.token_ids) for name in branch.lineage)
                branch.folding.hold(max(ends, default=0))


def position_of(branch: Branch, at: int | None) -> int:
    """The logical position after `at` output tokens."""
    if branch.status is BranchStatus.BEHIND_TRUNK:
        raise ConflictError(f"choice {branch.index} has not begun")
    length = len(branch.token_ids) - branch.num_prompt_tokens
    if at is not None and not 0 <= at <= length:
        raise ParameterError("at", f"must be in [0, {length}], the output tokens so far, got {at}")
    return branch.num_prompt_tokens + (length if at is None else at)


def state_hash(branch: Branch) -> str:
    """SHA-256 of all that decides how a branch goes on: its tokens, folds, parameters and random numbers."""
    request = branch.request
    folded = [branch.folding.folded, branch.folding.quantised] if branch.folding is not None else []
    policies = [asdict(request.thinking), asdict(request.fold)]
    parameters = [asdict(replace(request.sampling, n=1)), *policies, branch.random_stream]
    text = repr((branch.num_prompt_tokens, branch.token_ids, folded, parameters))
    return hashlib.sha256(text.encode()).hexdigest()
