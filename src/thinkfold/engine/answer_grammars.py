"""Grammars of one loaded model: compiled in the front's own threads, opened in the core."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from thinkfold.control.grammar import AnswerGrammar, newline_ids
from thinkfold.engine.language import Language
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.text.grammar import Grammars
from thinkfold.types import EngineRequest, Grammar, Phase

COMPILE_S = 10.0
_THREADS = 2  # a grammar that takes too long holds one of them until it is done


class AnswerGrammars:
    """Knows which tokens of the model's family stand outside of an answer."""

    def __init__(self, language: Language, vocab_size: int) -> None:
        family = language.family
        starts = family.tokens.starts if family else ()
        ends = family.tokens.ends if family else ()
        self._start_ids = frozenset(ids[0] for ids in starts if len(ids) == 1)
        self._newline_ids = newline_ids(language.vocabulary)
        self._has_openers = family is not None and bool(family.tokens.openers or family.texts.openers)
        self._vocab_size = vocab_size
        self._grammars = Grammars(language.vocabulary, vocab_size, {i for ids in (*starts, *ends) for i in ids})
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="thinkfold-grammar")

    async def compile(self, grammar: Grammar, *, seconds: float = COMPILE_S) -> str:
        """The grammar as the core wants it. Raises ParameterError, also after `seconds`."""
        if self._has_openers:
            raise UnsupportedError(
                grammar.field, "this model writes markers around its answer; grammars cannot hold it"
            )
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.compile, grammar)
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError:
            raise ParameterError(grammar.field, f"takes longer than {seconds:g} s to compile") from None

    def check_start(self, request: EngineRequest) -> None:
        """Raise UnsupportedError if the model would have to begin thinking with text that a grammar bars."""
        grammar, state = request.sampling.grammar, request.prompt
        may_think = request.thinking.enabled and request.thinking.budget != 0
        if grammar is not None and may_think and state.phase is Phase.ANSWER and not self._start_ids:
            raise UnsupportedError(
                grammar.field, "this model begins thinking with text that a grammar bars; switch thinking off"
            )

    def open(self, request: EngineRequest) -> AnswerGrammar | None:
        """The state of a fresh branch of `request`; None without a grammar."""
        if request.grammar is None:
            return None
        return AnswerGrammar(
            self._grammars.matcher(request.grammar),
            self._vocab_size,
            newline_ids=self._newline_ids,
            start_ids=self._start_ids if request.thinking.enabled else (),
        )

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
