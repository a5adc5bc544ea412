"""Bytes of tokens: byte-level and byte-fallback tokenizers."""

from __future__ import annotations

import random

import pytest
from branch_script import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from thinkfold.errors import UnsupportedError
from thinkfold.text.vocabulary import Vocabulary, byte_level_table

TEXTS = ["plain words, 12", "naïve Straße\r\n\t", "мысль 思考 🙂 🏳️‍🌈", "<think>é</think>\x00\x7f", " two  blanks "]


def sentencepiece_like(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    names = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "t", "h", "e", "é", "<0xZZ>"]
    vocab = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>▁", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def test_byte_level_table_is_a_bijection():
    assert sorted(byte_level_table().values()) == list(range(256))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(["word", "思"]), sentencepiece_like(FALLBACK)], ids=["bytes", "sp"]
)
def test_bytes_of_any_text_round_trip(tokenizer, text):
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(vocabulary.token_bytes, ids)) == text.encode()
    assert vocabulary.text(ids) == text


def test_special_added_and_end_tokens():
    tokenizer = byte_tokenizer(added=("<think>", "étage"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, (7, 9))
    assert vocabulary.eos_ids == {tokenizer.eos_token_id, 7, 9}
    special = {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>", "<|segment|>")}
    think, etage = tokenizer.convert_tokens_to_ids(["<think>", "étage"])
    assert vocabulary.special_ids == special
    assert vocabulary.added_ids == special | {think, etage}
    assert vocabulary.token_bytes(etage) == "étage".encode()  # an added token is text, not a byte map
    assert vocabulary.size == len(tokenizer)
    assert vocabulary.token_bytes(vocabulary.size) == vocabulary.token_bytes(-1) == b""


def test_byte_fallback_names():
    tokenizer = sentencepiece_like(FALLBACK)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    named = {name: vocabulary.token_bytes(i) for name, i in tokenizer.get_vocab().items()}
    assert (named["<0xFF>"], named["▁the"], named["<0xZZ>"]) == (b"\xff", b" the", b"<0xZZ>")
    assert named["<think>▁"] == "<think>▁".encode()


def test_metaspace_decoder_is_read():
    vocabulary = Vocabulary.from_tokenizer(sentencepiece_like(decoders.Metaspace()))
    assert b" the" in vocabulary.tokens


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), None])
def test_tokens_without_bytes_are_refused(decoder):
    tokenizer = sentencepiece_like(FALLBACK)
    backend = tokenizer.backend_tokenizer
    if decoder is None:
        tokenizer = object.__new__(type("Slow", (), {}))
    else:
        backend.decoder = decoder
    with pytest.raises(UnsupportedError, match="gives no bytes"):
        Vocabulary.from_tokenizer(tokenizer)


def test_random_bytes_decode_as_the_tokenizer_does():
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    rng = random.Random(5)
    for _ in range(50):
        ids = [rng.randrange(256) for _ in range(30)]
        assert vocabulary.text(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
