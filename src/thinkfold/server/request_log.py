"""One line of the log for a request that has ended: how, and what it cost. Texts stand in it only where asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from thinkfold.server.reply import Reply

logger = logging.getLogger(__name__)

EVENT = "thinkfold.request"


def log_request(request_id: str, reply: Reply, prompts: Sequence[str] | None) -> None:
    """A JSON object for the operator; `prompts` None leaves out all texts.

    `state`: `complete`, `failed` for a final error, `gone` where nobody waited for the end.
    """
    line = {
        "event": EVENT,
        "request": request_id,
        "tenant": reply.serving.tenant,
        "tier": reply.serving.service.tier.name,
        "state": "failed" if reply.failure is not None else "complete" if reply.finished else "gone",
        "choices": [choice.ending() for choice in reply.choices],
        "usage": reply.usage(),
    }
    if prompts is not None:
        texts = [{"reasoning": choice.reasoning, "text": choice.text} for choice in reply.choices]
        line |= {"prompts": list(prompts), "texts": texts}
    logger.info(json.dumps(line, allow_nan=False))
