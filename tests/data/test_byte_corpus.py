"""Byte corpora: the split is stable and does not leak, bytes are kept, wrong corpora are refused."""

import numpy as np
import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data import corpus_files, load_byte_corpus
from ldm_jax.data.byte_corpus import END_OF_DOCUMENT
from ldm_jax.errors import UserError


def documents(tokens):
    return set(tokens.tobytes().split(END_OF_DOCUMENT)) - {b""}


@pytest.fixture
def directory(tmp_path, rng):
    for index in range(60):
        text = bytes(rng.integers(32, 127, size=100, dtype=np.uint8)) + b"\n"
        (tmp_path / f"{index:02}.txt").write_bytes(text)
    return tmp_path


def config(path, **options):
    return DataConfig(path=str(path), **{"context": 16, "validation_fraction": 0.2, **options})


def test_every_document_is_in_one_part(directory):
    corpus = load_byte_corpus(config(directory / "*.txt"))
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert train | validation == {file.read_bytes() for file in directory.iterdir()}
    assert not train & validation
    assert 4 <= len(validation) <= 24  # 60 draws at .2: more than four standard deviations either way
    assert corpus.train.dtype == np.uint8


def test_split_does_not_depend_on_names_or_on_other_documents(directory):
    before = documents(load_byte_corpus(config(directory / "*.txt")).validation)
    for file in list(directory.glob("0*.txt")):
        file.rename(directory / f"z{file.name}")  # other order
    (directory / "copy.txt").write_bytes((directory / "11.txt").read_bytes())  # in the same part as its original
    assert documents(load_byte_corpus(config(directory / "*.txt")).validation) == before
    (directory / "new.txt").write_bytes(b"something new, long enough to be cut\n")
    after = documents(load_byte_corpus(config(directory / "*.txt")).validation)
    assert after - {b"something new, long enough to be cut\n"} == before


def test_long_files_are_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = b"".join(b"line %d\n" % n for n in range(2000)) + b"x" * 5000 + b"\nno end"
    (tmp_path / "long.txt").write_bytes(text)
    corpus = load_byte_corpus(config(tmp_path / "long.txt", document_bytes=1000))
    parts = documents(corpus.train) | documents(corpus.validation)
    assert sum(map(len, parts)) + 1000 * 4 >= len(text)  # equal parts of the x line count once
    assert all(len(part) <= 2000 for part in parts)
    assert sum(part.endswith(b"\n") for part in parts) >= len(parts) - 3
    assert len(corpus.validation) > 16


def test_one_short_file_can_be_cut(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"".join(b"line %d\n" % n for n in range(100)))
    with pytest.raises(UserError, match=r"1 document.*data\.document_bytes"):
        load_byte_corpus(config(tmp_path / "short.txt"))
    assert len(load_byte_corpus(config(tmp_path / "short.txt", document_bytes=200)).validation) > 16


def test_files_that_are_not_utf8_are_read_as_bytes(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index + 1, 255, 254, 0, 128]) * 50)
    corpus = load_byte_corpus(config(tmp_path / "*.bin"))
    assert {1, 2, 3, 4, 128, 254, 255} <= set(np.concatenate([corpus.train, corpus.validation]).tolist())


def test_patterns_match_subdirectories(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "deep.txt").write_text("deep")
    (tmp_path / "a" / "top.txt").write_text("top")
    files = corpus_files(DataConfig(path=f"{tmp_path}/**/*.txt"))
    assert [file.name for file in files] == ["deep.txt", "top.txt"]


def test_the_standard_library_is_sorted_and_has_no_installed_packages():
    files = corpus_files(DataConfig())
    assert files == sorted(files)
    assert {"argparse.py", "dataclasses.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)


@pytest.mark.parametrize(
    ("contents", "match"),
    [
        ({}, "no file"),
        ({"a.txt": b""}, "0 document"),
        ({"a.txt": b"short", "b.txt": b"shorter"}, "bytes.*17"),
        ({"a.txt": b"long enough for this" * 9, "b.txt": b"short"}, "(training|validation) part.*17"),
    ],
)
def test_corpora_that_are_too_small_are_refused(tmp_path, contents, match):
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=match):
        load_byte_corpus(config(tmp_path / "*.txt"))


def test_a_directory_is_not_a_pattern(tmp_path):
    with pytest.raises(UserError, match=r"data\.path.*\*\*/\*\.txt"):
        load_byte_corpus(config(tmp_path))


def test_a_dangling_link_is_no_file(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt"):
        load_byte_corpus(config(tmp_path / "gone.txt"))
