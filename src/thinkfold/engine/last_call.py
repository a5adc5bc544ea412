"""The last rung of a vote's equality: the engine's own model is asked once which answers mean the same."""

from __future__ import annotations

import logging

from thinkfold.engine.samples import Samples
from thinkfold.errors import EngineDeadError, ThinkfoldError, UnsupportedError
from thinkfold.text.prompts import PromptRenderer
from thinkfold.thinking.family import Family

MAX_REPLY_TOKENS = 256  # 16 lines of one number take less

logger = logging.getLogger(__name__)


class LastCall:
    """Asks without thinking, greedily, for at most 256 tokens."""

    def __init__(self, prompts: PromptRenderer, family: Family | None) -> None:
        self._prompts = prompts
        self._closes = family is not None and bool(family.force_ids)
        self._silent = family is None or self._closes or prompts.has_thinking_switch

    def check(self) -> None:
        """Raise UnsupportedError where the model cannot be asked."""
        if not self._prompts.has_template:
            raise UnsupportedError("vote.equality", "call asks the model, which has no chat template")
        if not self._silent:
            raise UnsupportedError("vote.equality", "call asks the model, whose thinking cannot be switched off")

    async def ask(self, samples: Samples, prompt: str) -> str:
        """The reply, billed to the vote; empty where there is none that ended by itself."""
        messages = [{"role": "user", "content": prompt}]
        try:
            ids = self._prompts.encode_chat(messages, enable_thinking=False, closes=self._closes)
            return await samples.aside(ids, MAX_REPLY_TOKENS)
        except EngineDeadError:
            raise
        except ThinkfoldError as error:
            logger.warning("answers of %s are not compared by a call: %s", samples.question.request_id, error)
            return ""
