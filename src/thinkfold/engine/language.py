"""Everything about a model's tokens that needs no weights: tokenizer, vocabulary, thinking family."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.runner.loader import load_tokenizer
from thinkfold.text.messages import Markers
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.families import Family, resolve_family


@dataclass(frozen=True, slots=True)
class Language:
    """`family` is None for a model that does not think. `opener_ids` begin the answer that a probe asks for."""

    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    family: Family | None
    closing_ids: tuple[int, ...]
    opener_ids: tuple[int, ...] = ()

    def single_token(self, text: str, field: str) -> int:
        """The id of `text`. Raises ParameterError naming `field` if it is not one token."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ParameterError(field, f"must be one token, {text!r:.60} is {len(ids)}")
        return ids[0]

    def family_with(self, delimiter: str | None) -> Family | None:
        """The model's family, in which the token `delimiter` ends a segment, too. Raises ParameterError."""
        family = self.family
        if family is None or delimiter is None:
            return family
        token = self.single_token(delimiter, "fold.delimiter_token")
        return replace(family, delimiter_ids=family.delimiter_ids | {token})

    @property
    def markers(self) -> Markers | None:
        """The family's first start and end marker as text."""
        family = self.family
        if family is None:
            return None
        tokens, texts = family.tokens, family.texts
        starts = [*map(self.vocabulary.text, tokens.starts), *map("".join, texts.starts)]
        ends = [*map(self.vocabulary.text, tokens.ends), *map("".join, texts.ends)]
        return Markers(starts[0], ends[0])


def load_language(config: EngineConfig) -> Language:
    """Read the tokenizer of `config.model` and resolve its thinking markers.

    Raises ParameterError, and UnsupportedError for closing words that the model would never write.
    """
    tokenizer, model_type, eos_ids = load_tokenizer(config)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, eos_ids)
    family = resolve_family(
        tokenizer,
        vocabulary,
        model_type,
        start=config.think_start,
        end=config.think_end,
        force=config.think_force,
    )
    if config.closing_words and not (family and family.force_ids):
        why = "its thinking cannot be ended by force" if family else "it does not think"
        raise UnsupportedError("closing_words", f"this model never writes them: {why}")
    closing_ids = tuple(tokenizer.encode(config.closing_words, add_special_tokens=False))
    opener_ids = tuple(tokenizer.encode(config.answer_opener, add_special_tokens=False))
    return Language(tokenizer, vocabulary, family, closing_ids, opener_ids)
