"""Reading answers: where they stand in a text, their forms, exact numbers, embedders and the last call's reply."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinkfold.config import EngineConfig
from thinkfold.control.canonical import Kind, form_of
from thinkfold.control.embedding import EmbeddingError, UrlEmbedder, configured_embedder, cosine, open_embedder
from thinkfold.control.extract import extract
from thinkfold.control.likeness import edit_ratio
from thinkfold.control.numbers import read_number
from thinkfold.control.symbolic import is_small
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import ParameterError


@pytest.mark.parametrize(
    ("text", "answer", "source"),
    [
        (r"\boxed{5} no, \boxed{7}", "7", "box"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "box"),
        (r"\boxed{4}, or rather \boxed{3", None, "none"),
        (r"\boxed{3", None, "none"),
        ("The answer is 9.", "9", "phrase"),
        ("maybe the answer is 3? </think>The answer is 5.", "5", "phrase"),
        (r"maybe \boxed{3} [/THINK] it is \boxed{4}", "4", "box"),
        (r"\boxed{2} and \boxed{3}", "2, 3", "box"),
        (r"$\boxed{2}$, $\boxed{3}$", "2, 3", "box"),
        (r"\boxed{1} fails. \boxed{2} and \boxed{3}", "2, 3", "box"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "box"),
        ("We add.\n\n**Final Answer:** 12", "12", "phrase"),
        ("42", "42", "line"),
        ("It is long.\nIt has two lines.", None, "none"),
        ("", None, "none"),
    ],
)
def test_case_70_which_answer_is_taken(text: str, answer: str | None, source: str) -> None:
    found = extract(text)
    assert (found.answer, found.source) == (answer, source)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3/4", Fraction(3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{1}{\frac{2}{3}}", Fraction(3, 2)),
        (r"3 \times 10^{-2}", Fraction(3, 100)),
        ("-2^2", Fraction(-4)),
        ("2^3^2", Fraction(512)),
        ("2**3", Fraction(8)),
        ("(1 + 2) * 3 - 4 / 8", Fraction(17, 2)),
        ("5!", Fraction(120)),
        (".5", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("2 3", None),
        ("1/0", None),
        ("12:00", None),
        ("2x", None),
        ("9^9^9", None),
        ("501!", None),
        ("2^0.5", None),
        ("(" * 100 + "1" + ")" * 100, None),
        ("2^{3}**2", None),
        ("", None),
    ],
)
def test_exact_numbers(text: str, value: Fraction | None) -> None:
    number = read_number(text)
    assert (number.value if number else None) == value


def test_a_decimal_stands_for_what_it_is_rounded_or_cut_from() -> None:
    cut, rounded, wrong, short = (read_number(t) for t in ("0.666666", "0.666667", "0.666668", "0.66667"))
    assert cut and rounded and wrong and short
    assert cut.stands_for(Fraction(2, 3)) and rounded.stands_for(Fraction(2, 3))
    assert not wrong.stands_for(Fraction(2, 3)) and not short.stands_for(Fraction(2, 3))
    assert read_number("1/3") is not None and not read_number("1/3").is_decimal  # pyright: ignore[reportOptionalMemberAccess]


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_is_read_back(value: Fraction) -> None:
    number = read_number(str(value))
    assert number is not None and number.value == value


@pytest.mark.parametrize(
    ("answer", "kind", "key"),
    [
        ("(b)", Kind.CHOICE, "choice:B"),
        (r"\text{C}.", Kind.CHOICE, "choice:C"),
        ("Option D", Kind.CHOICE, "choice:D"),
        ("b", Kind.TEXT, "text:b"),
        ("  Paris,   France. ", Kind.TEXT, "text:paris, france"),
        ("x = 5", Kind.NUMBER, "number:5|"),
        ("½", Kind.NUMBER, "number:1/2|"),
        ("x² + 1", Kind.MATH, "math:x^{2}+1"),
        ("90°", Kind.NUMBER, "number:90|degree"),
        ("5 miles per hour", Kind.TEXT, "text:5 miles per hour"),
        ("40 %", Kind.NUMBER, "number:2/5|"),
        ("3:4", Kind.TEXT, "text:3:4"),
    ],
)
def test_forms(answer: str, kind: Kind, key: str) -> None:
    form = form_of(answer)
    assert (form.kind, form.key) == (kind, key)


@given(st.text(max_size=60))
def test_every_text_has_a_form_and_the_form_of_its_text_is_the_same(text: str) -> None:
    assert form_of(text).key == form_of(f"  {text} ").key


@pytest.mark.parametrize("formula", ["e^{x^2}", r"\frac{x^{10}}{2}", "(x+1)^{999}", "10!"])
def test_ordinary_formulas_are_small(formula: str) -> None:
    assert is_small(formula)


@pytest.mark.parametrize(
    "formula", ["7^{9^{9}}", "(9^{9})^{1000}", "2^(3^3)", "2^{3}^{4}", "(10)!", "1" * 31, "{" * 13]
)
def test_formulas_that_may_explode_are_not(formula: str) -> None:
    assert not is_small(formula)


def test_edit_ratio_is_the_longest_common_subsequence() -> None:
    assert edit_ratio("abcd", "axcd") == 0.75
    assert edit_ratio("abc", "abc") == 1.0 and edit_ratio("abc", "xyz") == 0.0 and edit_ratio("", "") == 1.0


@given(st.text(max_size=40), st.text(max_size=40))
def test_edit_ratio_is_symmetric(a: str, b: str) -> None:
    assert edit_ratio(a, b) == edit_ratio(b, a)


class Endpoint(BaseHTTPRequestHandler):
    """An embeddings API that gives the lengths of words, in reverse order."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    broken = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        rows = [{"index": i, "embedding": [len(t), 1.0]} for i, t in enumerate(body["input"])]
        data = json.dumps({"data": rows[:0] if self.broken else rows[::-1]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/embeddings"
    server.shutdown()
    server.server_close()


def test_embeddings_over_http(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = UrlEmbedder(endpoint, "small")
    one, other = embedder.embed(["a", "bbb"])
    assert cosine(one, one) == pytest.approx(1.0)
    assert other[0] / other[1] == pytest.approx(3.0)
    assert Endpoint.bodies[-1] == {"model": "small", "input": ["a", "bbb"]}
    monkeypatch.setattr(Endpoint, "broken", True)
    with pytest.raises(EmbeddingError, match="0 vectors for 1"):
        embedder.embed(["a"])
    with pytest.raises(EmbeddingError):
        UrlEmbedder("http://127.0.0.1:9/none", "small", seconds=0.5).embed(["a"])


def test_embeddings_of_a_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "red": 2, "blue": 3, "house": 4}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=5, **size)).save_pretrained(tmp_path)
    embedder = open_embedder(str(tmp_path))
    alone, padded, other = embedder.embed(["red house", "red house", "blue blue blue house"])
    assert cosine(alone, padded) == pytest.approx(1.0, abs=1e-5)
    assert cosine(alone, other) < 0.999
    assert cosine(alone, embedder.embed(["red house"])[0]) == pytest.approx(1.0, abs=1e-5)  # padding changes nothing


async def test_an_engine_has_the_embedder_of_its_configuration(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(config: EngineConfig) -> NoReturn:
        raise AssertionError("no model is loaded for an embedder that is not there")

    with pytest.raises(ParameterError, match=r"answer_embedder: there is no folder"):
        await AsyncEngine.start(EngineConfig(answer_embedder=str(tmp_path / "none"), own_process=False), build=never)
    for wrong in ({"answer_min_cosine": 1.5}, {"answer_embedder_model": "small"}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            EngineConfig(**wrong)
    monkeypatch.setenv("THINKFOLD_EMBEDDER_KEY", "secret")
    embedder = configured_embedder(EngineConfig(answer_embedder=endpoint, answer_embedder_model="small"))
    assert embedder is not None and len(embedder.embed(["a", "b"])) == 2
    assert Endpoint.bodies[-1]["model"] == "small" and Endpoint.keys[-1] == "Bearer secret"
    assert configured_embedder(EngineConfig()) is None


def test_an_embedder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match=r"answer_embedder: there is no folder"):
        open_embedder(str(tmp_path / "none"))
    with pytest.raises(ParameterError, match=r"answer_embedder: cannot load"):
        open_embedder(str(tmp_path))
    monkeypatch.setattr("thinkfold.control.embedding.find_spec", lambda _: None)
    with pytest.raises(ParameterError, match=r"thinkfold\[embeddings\]"):
        open_embedder("minilm")
    with pytest.raises(ParameterError, match="http"):
        open_embedder("ftp://somewhere")
