"""Words for where a token stands and why things end."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where in a response a token stands."""

    THINKING = "thinking"
    ANSWER = "answer"


class FinishReason(StrEnum):
    """Why a branch ended, in OpenAI's words where they exist."""

    STOP = "stop"
    LENGTH = "length"
    BOUNDARY = "boundary"  # a part ends here, and a handle keeps its state
    ABORT = "abort"
    ERROR = "error"


class ThinkingEndReason(StrEnum):
    """Why thinking ended."""

    NATURAL = "natural"  # the model wrote its end marker
    BUDGET = "budget"  # the budget was spent
    CONTROL = "control"  # somebody ended it from outside
    DEADLINE = "deadline"  # the answer would have come too late
    COST = "cost"  # the answer would have cost too much
    EOS = "eos"  # the model sampled EOS inside thinking and the engine closed it
    UNCLOSED = "unclosed"  # the response ended while thinking was open
    VOTE = "vote"  # a vote was settled while this sample still thought, and it was to write the answer
    SEARCH = "search"  # a search had found its state, and it was to write the answer
    # Rules of early stopping, by their names (see docs/control.md).
    MARGIN = "margin"
    ENTROPY = "entropy"
    CONSISTENCY = "consistency"
    CONFIDENCE = "confidence"
    HOPELESS = "hopeless"
    LOOP = "loop"
