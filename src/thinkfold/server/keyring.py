"""The server's secret: signatures over thinking, and sealed thinking that only this server opens.

A `context` says what a token is for and whose it is; a token made in another context is foreign.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from thinkfold.errors import ParameterError

MIN_SECRET_BYTES = 32
_VERSION = b"\x01"
_NONCE_BYTES = 12


class Keyring:
    """Keys drawn from one secret (HKDF-SHA256, RFC 5869); without one, a secret of this process.

    Servers that share the secret accept each other's tokens. Signatures are HMAC-SHA256, seals
    AES-256-GCM with random nonces (good for 2**32 seals a secret). Raises ParameterError for a
    secret of fewer than 32 bytes.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and len(secret) < MIN_SECRET_BYTES:
            raise ParameterError("secret_file", f"must hold at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
        secret = secret or secrets.token_bytes(MIN_SECRET_BYTES)
        self._signing = _derive(secret, b"thinkfold signature")
        self._sealing = AESGCM(_derive(secret, b"thinkfold seal"))

    @classmethod
    def from_file(cls, path: str | Path) -> Keyring:
        """A keyring of the secret that a file holds; white space around it does not count."""
        try:
            return cls(Path(path).read_bytes().strip())
        except OSError as error:
            raise ParameterError("secret_file", f"cannot be read: {error.strerror or error}") from None

    def sign(self, text: str, context: Sequence[str]) -> str:
        """A token that proves that `text` is ours."""
        return _encode(_VERSION + self._mac(text, context))

    def is_signed(self, token: str, text: str, context: Sequence[str]) -> bool:
        """Whether `token` was made by `sign` from the same text and context; in constant time."""
        return hmac.compare_digest(_decode(token), _VERSION + self._mac(text, context))

    def seal(self, text: str, context: Sequence[str]) -> str:
        """`text`, readable and writable for us alone."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _encode(_VERSION + nonce + self._sealing.encrypt(nonce, text.encode(), _pack(context)))

    def open(self, token: str, context: Sequence[str]) -> str | None:
        """The text of a sealed token; None for one that is foreign or changed."""
        data = _decode(token)
        head, nonce, body = data[:1], data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        if head != _VERSION or len(nonce) < _NONCE_BYTES:
            return None
        try:
            return self._sealing.decrypt(nonce, body, _pack(context)).decode()
        except InvalidTag:
            return None

    def _mac(self, text: str, context: Sequence[str]) -> bytes:
        return hmac.digest(self._signing, _pack([*context, text]), "sha256")


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=purpose).derive(secret)


def _pack(parts: Sequence[str]) -> bytes:
    """Parts as bytes from which no other parts could come."""
    return json.dumps(list(parts)).encode()


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(token: str) -> bytes:
    """The bytes of a token; none for one that is not base64."""
    try:
        return base64.b64decode(token.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return b""
