"""After a reply: what the chat's next turn will begin with, so that the engine can compute it ahead.

Templates strip old thinking, so the answer stands at other positions in the next prompt and nothing of
its KV can be used again. Only the server knows how the next prompt will look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinkfold.errors import ThinkfoldError
from thinkfold.server.contract import Engine, Warmable
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import FinishReason, RequestOutput

logger = logging.getLogger(__name__)
_tasks: dict[asyncio.Task[None], tuple[str, str]] = {}  # owner, session; the loop itself holds them only weakly


@dataclass(slots=True)
class NextTurn:
    """A chat whose answer is being written; `tools`, `enable_thinking` and `effort` as its prompt was rendered."""

    messages: Sequence[Mapping[str, Any]]
    enable_thinking: bool | None = None
    effort: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    calls_begin: str | None = None  # how a tool call begins in the answer's text
    _parts: list[str] = field(default_factory=list)
    _thought: bool = False
    _whole: bool = False

    def note(self, output: RequestOutput) -> None:
        """News of the one choice."""
        for choice in output.outputs:
            self._parts.append(choice.text)
            self._thought |= bool(choice.reasoning)
            self._whole |= choice.finish_reason is FinishReason.STOP

    def render(self, prompts: PromptRenderer) -> list[int]:
        """The tokens that the next turn's prompt will begin with; none where that cannot be known."""
        text = "".join(self._parts)
        if not self._whole or not text.strip() or self.messages[-1].get("role") == "assistant":
            return []  # nobody goes on from half an answer, and one that was continued is two messages in one
        if self.calls_begin is not None and self.calls_begin in text:
            return []  # what follows are results, and old thinking stays until the next question
        if self._thought and not prompts.strips_thinking:
            return []  # KV behind thinking is never shared
        answer = {"role": "assistant", "content": text}
        return prompts.encode_history([*self.messages, answer], self.enable_thinking, self.effort, self.tools)


def compute_ahead(
    engine: Engine, turn: NextTurn, name: str, namespace: tuple[str, ...], owner: str, session: str = ""
) -> None:
    """Let the engine compute the next turn's beginning when it has nothing else to do."""
    if engine.config.turn_ahead and engine.config.enable_prefix_caching and isinstance(engine, Warmable):
        task = asyncio.create_task(_compute(engine, engine, turn, name, namespace, (owner, session)))
        _tasks[task] = owner, session
        task.add_done_callback(_tasks.pop)


async def give_up_ahead(owner: str, session: str = "") -> None:
    """Ask the engine for no more of an owner's next turns, or of one session's, than it has been asked for."""
    mine = [task for task, whose in _tasks.items() if whose[0] == owner and session in ("", whose[1])]
    for task in mine:
        task.cancel()
    await asyncio.gather(*mine, return_exceptions=True)


async def _compute(
    engine: Engine, warmable: Warmable, turn: NextTurn, name: str, namespace: tuple[str, ...], whose: tuple[str, str]
) -> None:
    try:
        ids = await asyncio.to_thread(turn.render, engine.prompts)
        if ids and len(ids) <= engine.model.max_prompt_len:
            (owner, session), ttl_s = whose, engine.config.pin_ttl_s
            await warmable.prefill(name, ids, namespace, owner=owner, idle=True, ttl_s=ttl_s, session=session)
    except ThinkfoldError as error:  # nobody waits for it: a template that refuses, an engine that stops
        logger.debug("no turn is computed ahead: %s", error)
