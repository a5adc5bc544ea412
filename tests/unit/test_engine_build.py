"""What a core knows of its model's language: one more token may end a segment, closing words must be of use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinkfold.config import EngineConfig
from thinkfold.engine.language import Language, load_language
from thinkfold.errors import ParameterError, UnsupportedError


@pytest.fixture(scope="module")
def language() -> Language:
    return load_language(EngineConfig())


def test_an_extra_token_ends_segments_beside_the_familys_own(language: Language) -> None:
    family = language.family_with(".")
    assert family is not None and language.family is not None
    (token,) = language.tokenizer.encode(".", add_special_tokens=False)
    assert family.delimiter_ids == language.family.delimiter_ids | {token}
    assert language.family_with(None) is language.family
    assert replace(language, family=None).family_with(".") is None


@pytest.mark.parametrize("text", ["", "several tokens, surely"])
def test_anything_but_one_token_is_refused(language: Language, text: str) -> None:
    with pytest.raises(ParameterError, match="fold_delimiter_token: must be one token"):
        language.single_token(text, "fold_delimiter_token")


def test_closing_words_that_would_never_be_written_are_refused(
    language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(closing_words="Time is up.")
    assert load_language(config).closing_ids
    assert language.family is not None
    for family in (None, replace(language.family, force_ids=())):
        monkeypatch.setattr("thinkfold.engine.language.resolve_family", lambda *_, family=family, **__: family)
        with pytest.raises(UnsupportedError, match="closing_words: this model never writes them"):
            load_language(config)
        assert load_language(EngineConfig()).closing_ids == ()
