"""From a grammar's text to its compiled form, and from that to a matcher. Knows one vocabulary.

Compiling and matching are xgrammar's (Dong et al. 2024, "XGrammar"). A compiled grammar travels
as text, so that the engine's core never compiles.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.text.json_schema import enforceable
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.types import Grammar

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILED_BYTES = 64 * 1024 * 1024
CACHED = 64  # grammars; clients send the same few again and again
_SOURCE = re.compile(r"^\[[^]]*\] \S+: (Check failed: .*? is false: )?")  # where in xgrammar's code, no use to a client


class Grammars:
    """Compiles and opens grammars over `vocab_size` logits. Thread-safe.

    `barred_ids` are never part of an answer (thinking markers), besides special tokens.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, barred_ids: Iterable[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._barred = vocabulary.special_ids | frozenset(barred_ids)
        self._info: xgrammar.TokenizerInfo | None = None
        self._compiled: OrderedDict[str, str] = OrderedDict()
        self._opened: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> str:
        """The compiled grammar as text; blocks while it is made. Raises ParameterError that names its field."""
        with self._lock:
            found = self._compiled.get(grammar.format)
        if found is not None:
            return found
        compiled = self._compile(grammar)
        with self._lock:
            _keep(self._compiled, grammar.format, compiled)
        return compiled

    def matcher(self, compiled: str) -> xgrammar.GrammarMatcher:
        """A fresh matcher of what `compile` returned, here or in another process."""
        import xgrammar

        with self._lock:
            grammar = self._opened.get(compiled)
            if grammar is None:
                grammar = xgrammar.CompiledGrammar.deserialize_json(compiled, self._tokenizer())
            _keep(self._opened, compiled, grammar)
        return xgrammar.GrammarMatcher(grammar)

    def _compile(self, grammar: Grammar) -> str:
        try:
            import xgrammar
        except ImportError:
            raise UnsupportedError(grammar.field, "needs the package xgrammar (the extra `grammar`)") from None
        try:
            format_ = _prepared(json.loads(grammar.format), grammar.field)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ParameterError(grammar.field, f"is not valid JSON ({error})") from None
        with self._lock:
            info = self._tokenizer()
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": format_}))
        except (RuntimeError, ValueError, TypeError) as error:
            raise ParameterError(grammar.field, _SOURCE.sub("", str(error).strip()).strip()[:500]) from None
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise ParameterError(grammar.field, f"compiles to more than {MAX_COMPILED_BYTES >> 20} MiB")
        return compiled.serialize_json()

    def _tokenizer(self) -> xgrammar.TokenizerInfo:
        if self._info is None:
            import xgrammar

            vocabulary, barred = self._vocabulary, self._barred
            tokens = [b"" if i in barred else vocabulary.token_bytes(i) for i in range(self._vocab_size)]
            ends = sorted(i for i in vocabulary.eos_ids if i < self._vocab_size)
            self._info = xgrammar.TokenizerInfo(
                tokens, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=ends
            )
        return self._info


def _keep(cache: OrderedDict[str, Any], key: str, value: Any) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > CACHED:
        cache.popitem(last=False)


def _prepared(part: Any, field: str) -> Any:
    """A format in which every JSON schema is one that the grammar enforces."""
    if isinstance(part, list):
        return [_prepared(each, field) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and "json_schema" in part:
        return {**part, "json_schema": enforceable(part["json_schema"], field)}
    return {key: _prepared(value, field) for key, value in part.items()}
