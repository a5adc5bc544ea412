"""A branch's control that can be taken apart: forked, gone back with, ended at a boundary. A fork costs its state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from thinkfold.control.branch import BranchControl, Verdict
from thinkfold.control.closing import Forced
from thinkfold.control.outbox import Outbox
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.family import Family
from thinkfold.types import EngineRequest, FinishReason, Phase, ThinkingEndReason, Until


class PartControl(BranchControl):
    """Its request's `until` ends a part with `finish_reason` boundary: held text stays held for whoever goes on."""

    def __init__(
        self, request: EngineRequest, branch: int, vocabulary: Vocabulary, family: Family | None, **more: Any
    ) -> None:
        """`more` are the other arguments of BranchControl."""
        super().__init__(request, branch, vocabulary, family, **more)
        self._until = request.until
        self._part_start = 0  # output tokens before the part that `until` ends
        self._shared: tuple[object, ...] = (vocabulary, request.sampling, request.thinking)
        if family is not None:
            self._shared += (family, family.token_tables, family.text_tables)

    def accept(self, token_id: int) -> Verdict:
        verdict = super().accept(token_id)
        if self._finish is None and self._until is not None and self._part_is_over(self._until):
            self._finish, self._outbox.changed = FinishReason.BOUNDARY, True
            return verdict._replace(finish=self._finish)
        return verdict

    def must_wait(self, inflight: int) -> bool:
        most = None if self._until is None else self._until.max_tokens
        if most is not None and inflight and self.num_output_tokens + inflight - self._part_start >= most:
            return True
        return super().must_wait(inflight)

    def fork(self, index: int, until: Until | None = None) -> PartControl:
        """A control that goes on from here as choice `index`, and ends its part at `until`."""
        memo: dict[int, Any] = {id(shared): shared for shared in self._shared}
        memo[id(self._outbox)] = Outbox(index)
        child = copy.deepcopy(self, memo)
        child._until, child._part_start = until, self.num_output_tokens
        if child._finish is FinishReason.BOUNDARY:
            child._finish = None
        return child

    def replay(self, token_ids: Sequence[int], forced: Sequence[Forced], *, told: bool) -> None:
        """Account anew for the first tokens of a branch with the runs `forced`; a fresh control's first call.

        `told`: what they print is known outside; else it is told again from the first token on.
        """
        runs = {index: run for run in forced for index in range(run.start, run.end)}
        for index, token_id in enumerate(token_ids):
            run = runs.get(index)
            if run is None:
                if self._grammar is not None and self.phase is not Phase.THINKING:
                    self._grammar.accept(token_id)
                self._account(token_id, silent=self._is_eos(token_id))
                continue
            if run.closing and run.cause is ThinkingEndReason.EOS:
                self._eos_repaired, self._barred_index = True, run.end
            elif run.closing:
                self._closing.spoken()
            self._end_cause = run.cause
            self._num_injected += 1
            self._account(token_id, silent=False)
            self._end_cause = ThinkingEndReason.NATURAL
        self.forced = [run.upto(len(token_ids)) for run in forced if run.start < len(token_ids)]
        if told:
            self._outbox = Outbox(self._outbox.index)
        else:
            self._outbox.restart, self._outbox.changed = len(token_ids) - self._num_injected, True

    def told(self, sampled: int) -> int:
        """After a replay: of its sampled tokens, those whose statistics are among the first `sampled`, told before."""
        restart = self._outbox.restart or 0
        self._outbox.restart = min(restart, sampled)
        return restart

    def _part_is_over(self, until: Until) -> bool:
        """After the newest token. A segment may be known some tokens late."""
        length = self.num_output_tokens - self._part_start
        if until.max_tokens is not None and length >= until.max_tokens:
            return True
        return length >= max(1, until.min_tokens) and any(b.kind == until.at for b in self._newest)
