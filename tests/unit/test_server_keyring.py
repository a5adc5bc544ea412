"""Signatures and seals: ours are known, all others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinkfold.errors import ParameterError
from thinkfold.server.keyring import Keyring

SECRET = b"0123456789abcdef0123456789abcdef"
TEXT = "Wait, 2 + 2 = 4 … \ud83d\ude42".encode("utf-16", "surrogatepass").decode("utf-16")


def test_tokens_hold_for_the_same_secret_text_and_context() -> None:
    one, other = Keyring(SECRET), Keyring(SECRET)
    assert other.is_signed(one.sign(TEXT, ["a", "b"]), TEXT, ["a", "b"])
    assert other.open(one.seal(TEXT, ["a", "b"]), ["a", "b"]) == TEXT


@pytest.mark.parametrize("context", [["ab"], ["a"], ["b", "a"], ["a", "b", ""], ['a", "b']])
def test_another_context_is_foreign(context: list[str]) -> None:
    keys = Keyring(SECRET)
    assert not keys.is_signed(keys.sign(TEXT, ["a", "b"]), TEXT, context)
    assert keys.open(keys.seal(TEXT, ["a", "b"]), context) is None


def test_another_secret_text_or_kind_of_token_is_foreign() -> None:
    keys, others = Keyring(), Keyring()
    assert not others.is_signed(keys.sign(TEXT, []), TEXT, [])
    assert not keys.is_signed(keys.sign(TEXT, []), TEXT + " ", [])
    assert not keys.is_signed(keys.seal(TEXT, []), TEXT, [])
    assert others.open(keys.seal(TEXT, []), []) is None
    assert keys.open(keys.sign(TEXT, []), []) is None


def test_every_changed_character_is_noticed() -> None:
    keys = Keyring(SECRET)
    for token in (keys.sign("w", []), keys.seal("w", [])):
        for i, char in enumerate(token.rstrip("=")[:-1]):
            changed = token[:i] + ("A" if char != "A" else "B") + token[i + 1 :]
            assert not keys.is_signed(changed, "w", []) and keys.open(changed, []) is None


@pytest.mark.parametrize("token", ["", "x", "ü", "AQ==", "no base64!", "\ud800"])
def test_nonsense_is_foreign(token: str) -> None:
    assert not Keyring(SECRET).is_signed(token, "", []) and Keyring(SECRET).open(token, []) is None


def test_seals_show_nothing_and_differ() -> None:
    keys = Keyring(SECRET)
    assert keys.seal(TEXT, []) != keys.seal(TEXT, []) and "Wait" not in keys.seal(TEXT, [])


def test_secrets_come_from_files_and_have_a_length(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert Keyring(SECRET).is_signed(Keyring.from_file(tmp_path / "secret").sign("w", []), "w", [])
    (tmp_path / "short").write_bytes(SECRET[:31])
    for name in ("short", "none"):
        with pytest.raises(ParameterError, match="secret_file"):
            Keyring.from_file(tmp_path / name)
