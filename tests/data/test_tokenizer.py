"""Tokenizers: decoding inverts encoding, texts contain no end-of-document token, errors name the file."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from corpora import words
from ldm_jax.data import ByteTokenizer, JsonTokenizer, load_tokenizer, read_tokenizer, train_bpe
from ldm_jax.data.tokenizer import token_dtype
from ldm_jax.errors import UserError

HARD = [
    "",
    " two  spaces\t\r\n\n",
    "größer → 日本 🙂 e\u0301 \ufeff\u202e",
    "".join(map(chr, range(300))).replace("\0", ""),
    b"not \xff\xfe UTF-8 \xe6\x97".decode(errors="surrogateescape"),
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(words(np.random.default_rng(0), 300), 400)


@pytest.mark.parametrize("text", HARD)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode(errors="surrogateescape")
    assert ids.dtype == np.uint8


def test_zero_bytes_are_refused_and_counted():
    with pytest.raises(UserError, match=r"'a.*zero bytes \(2\)"):
        ByteTokenizer().encode("a\0b\0")


@pytest.mark.parametrize("text", HARD)
def test_a_bpe_round_trips(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text.encode(errors="surrogateescape").decode(errors="replace").encode()
    assert ids.dtype == np.uint16
    assert all((a == b).all() for a, b in zip(bpe.encode_batch([text, "cat"]), [ids, bpe.encode("cat")], strict=True))


def test_a_sequence_may_end_inside_a_character(bpe):
    text = "日本 größer 🙂 " * 3
    ids = bpe.encode(text)
    pieces = [bpe.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert all(text.encode().startswith(piece) for piece in pieces)
    assert b"".join(bpe.decode([token]) for token in ids.tolist()) == text.encode()
    assert any(piece.decode(errors="replace").endswith("\ufffd") for piece in pieces)
    for byte in range(256):
        assert bpe.decode(bpe.encode(chr(byte))) == chr(byte).encode()


def test_training_a_bpe_is_deterministic(bpe):
    assert bpe.vocabulary == 400
    assert len(bpe.encode("return def return")) < 10
    again = train_bpe(iter(words(np.random.default_rng(0), 300)), 400)
    assert again.fingerprint == bpe.fingerprint
    assert train_bpe(words(np.random.default_rng(1), 300), 400).fingerprint != bpe.fingerprint
    with pytest.raises(UserError, match=r"vocabulary is 256.* 257"):
        train_bpe(["a"], 256)
    assert train_bpe(["a \ud800 half of a pair"], 300).encode("\ud800").size


def test_special_tokens_in_a_text_are_text(bpe):
    text = "a<|endoftext|>b"
    ids = bpe.encode(text)
    assert bpe.end_of_document not in ids
    assert bpe.decode(ids) == text.encode()
    assert bpe.decode([bpe.end_of_document]) == b"<|endoftext|>"


def test_tokens_outside_the_vocabulary_have_no_bytes(bpe):
    # A model's vocabulary may be padded.
    assert bpe.decode([*bpe.encode("cat").tolist(), 400, 70_000]) == b"cat"
    assert ByteTokenizer().decode([99, 256, 511]) == b"c"


def test_saved_tokenizers_load(bpe, tmp_path):
    for tokenizer in (bpe, ByteTokenizer()):
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        assert again.fingerprint == tokenizer.fingerprint
        assert (again.vocabulary, again.end_of_document) == (tokenizer.vocabulary, tokenizer.end_of_document)
        np.testing.assert_array_equal(again.encode("größer cat"), tokenizer.encode("größer cat"))


def test_a_changed_or_missing_file_is_named(bpe, tmp_path):
    with pytest.raises(UserError, match=r"vocabulary\.json"):
        load_tokenizer(tmp_path)
    bpe.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def word_level(*special, **options):
    """A tokenizer that is not byte-level and, like those of many models, truncates and pads texts."""
    vocabulary = {"[UNK]": 0, "cat": 1, "sat": 2, "the": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(name, **options) for name in special])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    return tokenizer.to_str()


def test_texts_are_neither_truncated_nor_padded():
    tokenizer = JsonTokenizer(word_level("</s>", special=True))
    assert tokenizer.encode("The cat sat the").tolist() == [3, 1, 2, 3]
    assert tokenizer.decode([3, 1]) == b"thecat"
    assert tokenizer.end_of_document == 4
    assert token_dtype(tokenizer.vocabulary) == np.uint8


def test_the_end_of_document_token_can_be_chosen(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(word_level("<doc>", "<pad>", special=False))
    with pytest.raises(UserError, match=r"--end-of-document \(<doc>, <pad>\)"):
        read_tokenizer(file)
    with pytest.raises(UserError, match=r"<dok>.*--end-of-document"):
        read_tokenizer(file, "<dok>")
    tokenizer = read_tokenizer(file, "<doc>")
    assert tokenizer.end_of_document == 4
    assert tokenizer.encode("cat <doc> sat").tolist() == [1, 2]  # the token is dropped from texts
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).end_of_document == 4
    assert read_tokenizer(file, "<pad>").fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", json.dumps({"model": {}}).encode()])
def test_files_that_are_no_tokenizer_are_named(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=r"t\.json"):
        read_tokenizer(tmp_path / "t.json")
    with pytest.raises(UserError, match=tmp_path.name):
        read_tokenizer(tmp_path)


def test_tokens_before_a_text_are_those_of_the_post_processor():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert JsonTokenizer(tokenizer.to_str()).start == ()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    found = JsonTokenizer(tokenizer.to_str())
    assert found.start == (2,)
    assert found.encode("a").tolist() == [1]
    assert ByteTokenizer().start == ()


def test_ids_without_a_token():
    vocabulary = {"[UNK]": 0, "cat": 7, "</s>": 9}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["</s>"])
    assert JsonTokenizer(tokenizer.to_str()).ids.tolist() == [0, 7, 9]
    assert JsonTokenizer(tokenizer.to_str()).vocabulary == 10
    with pytest.raises(UserError, match=r"3 tokens.* 5,000,000"):
        JsonTokenizer(tokenizer.to_str().replace("7", "5000000"))


def test_a_byte_order_mark_is_no_part_of_a_tokenizer(tmp_path):
    (tmp_path / "t.json").write_text(word_level("</s>"), encoding="utf-8-sig")
    assert read_tokenizer(tmp_path / "t.json").vocabulary == 5


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_the_smallest_type_that_holds_the_vocabulary(vocabulary, dtype):
    assert token_dtype(vocabulary) == np.dtype(dtype)
