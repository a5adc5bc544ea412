"""Values that cross module borders: parameters, messages and outputs."""

from thinkfold.types.control import ControlParams, EarlyStop, Preset, parse_control, parse_early_stop
from thinkfold.types.fold import (
    DELIMITER_LAG,
    FOLD_PROFILES,
    MAX_SEGMENT_TOKENS,
    AtAnswer,
    FoldMode,
    FoldParams,
    FoldPolicy,
    FoldProfile,
)
from thinkfold.types.grammar import MAX_GRAMMAR_CHARS, Grammar, schema_format
from thinkfold.types.limits import Clamp, Limits
from thinkfold.types.outcome import AnswerClass, BestOfState, Outcome, SampleScore, SearchNode, SearchState, VoteState
from thinkfold.types.output import (
    Boundary,
    CompletionOutput,
    Costs,
    Fold,
    RequestOutput,
    Segment,
    TokenLogprobs,
    TokenStats,
)
from thinkfold.types.phases import FinishReason, Phase, ThinkingEndReason
from thinkfold.types.prefix import PinnedPrefix
from thinkfold.types.probe import ProbeResult
from thinkfold.types.request import EngineRequest, PromptState
from thinkfold.types.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, SamplingParams
from thinkfold.types.search import SearchParams, parse_search
from thinkfold.types.service import Prices, Service, Tier
from thinkfold.types.session import SessionParams, SessionState
from thinkfold.types.thinking import DEFAULT_THINKING_BUDGET, EFFORT_BUDGETS, UNLIMITED, ThinkingParams, ThinkingPolicy
from thinkfold.types.until import Handle, Until
from thinkfold.types.verdict import Judged, Score, Scorer, Verdict
from thinkfold.types.vote import (
    BestOfParams,
    Decision,
    VoteParams,
    one_decision,
    parse_best_of,
    parse_vote,
)

__all__ = [
    "DEFAULT_THINKING_BUDGET",
    "DELIMITER_LAG",
    "EFFORT_BUDGETS",
    "FOLD_PROFILES",
    "MAX_GRAMMAR_CHARS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_SEGMENT_TOKENS",
    "MAX_STOP_STRINGS",
    "UNLIMITED",
    "AnswerClass",
    "AtAnswer",
    "BestOfParams",
    "BestOfState",
    "Boundary",
    "Clamp",
    "CompletionOutput",
    "ControlParams",
    "Costs",
    "Decision",
    "EarlyStop",
    "EngineRequest",
    "FinishReason",
    "Fold",
    "FoldMode",
    "FoldParams",
    "FoldPolicy",
    "FoldProfile",
    "Grammar",
    "Handle",
    "Judged",
    "Limits",
    "Outcome",
    "Phase",
    "PinnedPrefix",
    "Preset",
    "Prices",
    "ProbeResult",
    "PromptState",
    "RequestOutput",
    "SampleScore",
    "SamplingParams",
    "Score",
    "Scorer",
    "SearchNode",
    "SearchParams",
    "SearchState",
    "Segment",
    "Service",
    "SessionParams",
    "SessionState",
    "ThinkingEndReason",
    "ThinkingParams",
    "ThinkingPolicy",
    "Tier",
    "TokenLogprobs",
    "TokenStats",
    "Until",
    "Verdict",
    "VoteParams",
    "VoteState",
    "one_decision",
    "parse_best_of",
    "parse_control",
    "parse_early_stop",
    "parse_search",
    "parse_vote",
    "schema_format",
]
