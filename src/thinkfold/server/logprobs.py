"""Log-probabilities in OpenAI's two shapes, aligned with the text: markers and end tokens have none."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence

from thinkfold.server.replies import LegacyLogprobs, Logprobs, TokenLogprob, TokenText
from thinkfold.types import Phase, TokenLogprobs

TokenBytes = Callable[[int], bytes]
_LOWEST = -9999.0  # OpenAI's number for "as good as impossible"; JSON has no infinity


class TextPosition:
    """Where the next token's text begins; a character in several tokens counts at its last one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def advance(self, data: bytes) -> int:
        """The start of a token of these bytes, which is then behind us."""
        start = self._chars
        self._chars += len(self._decoder.decode(data))
        return start


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> TokenText:
    data = token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def chat_logprobs(items: Sequence[TokenLogprobs], num_top: int, token_bytes: TokenBytes) -> Logprobs:
    """`{"content": [...], "reasoning": [...], "refusal": null}` with `num_top` alternatives a token."""
    shown: dict[Phase, list[TokenLogprob]] = {Phase.ANSWER: [], Phase.THINKING: []}
    for item in items:
        if item.phase is not None:
            top = [_entry(i, value, token_bytes) for i, value in item.top[:num_top]]
            shown[item.phase].append({**_entry(item.token_id, item.logprob, token_bytes), "top_logprobs": top})
    return {"content": shown[Phase.ANSWER], "reasoning": shown[Phase.THINKING], "refusal": None}


def legacy_logprobs(
    items: Sequence[TokenLogprobs], num_top: int, token_bytes: TokenBytes, position: TextPosition
) -> LegacyLogprobs:
    """The lists of `/v1/completions`, answer tokens only; moves `position` behind them."""
    items = [item for item in items if item.phase is Phase.ANSWER]
    tokens = [token_bytes(item.token_id).decode("utf-8", "replace") for item in items]
    offsets = [position.advance(token_bytes(item.token_id)) for item in items]
    top = [
        {token_bytes(i).decode("utf-8", "replace"): _finite(value) for i, value in item.top[:num_top]}
        | {token: _finite(item.logprob)}
        for token, item in zip(tokens, items, strict=True)
    ]
    values = [_finite(item.logprob) for item in items]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
