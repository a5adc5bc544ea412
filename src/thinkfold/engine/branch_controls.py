"""The control of one branch, from its request and the model's tokens."""

from __future__ import annotations

from thinkfold.control.grammar import AnswerGrammar
from thinkfold.control.parts import PartControl
from thinkfold.engine.language import Language
from thinkfold.thinking.delimiter import DelimiterSearch, compile_delimiter
from thinkfold.types import EngineRequest


def make_control(
    language: Language, request: EngineRequest, branch: int, grammar: AnswerGrammar | None = None
) -> PartControl:
    """`grammar` holds the answer, where the request has one."""
    fold = request.fold
    regex = fold.delimiter_regex
    return PartControl(
        request,
        branch,
        language.vocabulary,
        language.family_with(fold.delimiter_token),
        closing_ids=language.closing_ids,
        min_segment_tokens=fold.numbers.min_segment_tokens,
        max_segment_tokens=fold.numbers.max_segment_tokens,
        grammar=grammar,
        search=None if regex is None else DelimiterSearch(compile_delimiter(regex, "fold.delimiter_regex")),
    )
