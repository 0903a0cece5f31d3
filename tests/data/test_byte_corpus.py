"""Byte corpora: the split is stable and does not leak, bytes are kept, wrong corpora are refused."""

import numpy as np
import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data import corpus_files, load_byte_corpus, load_data
from ldm_jax.data.byte_corpus import END_OF_DOCUMENT
from ldm_jax.errors import UserError


def documents(tokens):
    return set(tokens.tobytes().split(END_OF_DOCUMENT)) - {b""}


@pytest.fixture
def directory(tmp_path, rng):
    for index in range(300):
        text = bytes(rng.integers(32, 127, size=100, dtype=np.uint8)) + b"\n"
        (tmp_path / f"{index:03}.txt").write_bytes(text)
    return tmp_path


def config(path, **options):
    return DataConfig(path=str(path), **{"context": 16, "validation_fraction": 0.2, **options})


def test_every_document_is_in_one_part(directory):
    corpus = load_byte_corpus(config(directory / "*.txt"))
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert train | validation == {file.read_bytes() for file in directory.iterdir()}
    assert not train & validation
    assert 32 <= len(validation) <= 88  # 300 draws at .2: four standard deviations either way
    assert corpus.train.dtype == np.uint8


def test_split_does_not_depend_on_names_or_on_other_documents(directory):
    before = documents(load_byte_corpus(config(directory / "*.txt")).validation)
    for file in list(directory.glob("0*.txt")):
        file.rename(directory / f"z{file.name}")  # other order
    (directory / "copy.txt").write_bytes((directory / "111.txt").read_bytes())  # in the same part as its original
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
    with pytest.raises(UserError, match=r"data\.validation_path.*data\.document_bytes"):
        load_byte_corpus(config(tmp_path / "short.txt"))
    assert len(load_byte_corpus(config(tmp_path / "short.txt", document_bytes=200)).validation) > 16


@pytest.mark.parametrize("size", [6_000, 20_000, 90_000, 120_000, 200_000, 1_000_000])
def test_the_held_out_share_of_a_small_file_is_near_the_fraction(tmp_path, rng, size):
    lines = np.where(rng.random(size) < 0.02, 10, rng.integers(32, 127, size))  # lines of 50 bytes
    (tmp_path / "small.txt").write_bytes(lines.astype(np.uint8).tobytes())
    corpus = load_byte_corpus(config(tmp_path / "small.txt", validation_fraction=0.05))
    total = len(corpus.train) + len(corpus.validation)
    # The smallest cut is 1024 to 2048 bytes.
    assert 0.05 / 1.5 <= len(corpus.validation) / total <= max(0.05 * 1.5, 2048 / size)


def test_a_share_that_is_far_from_the_fraction_is_a_warning(tmp_path, rng):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_bytes(rng.integers(32, 127, 900, np.uint8).tobytes())
    assert not load_data(config(tmp_path / "*.txt", validation_fraction=0.3), 256).warnings
    (warning,) = load_data(config(tmp_path / "*.txt", validation_fraction=0.05), 256).warnings
    assert "validation_fraction is 0.05" in warning


def test_files_that_are_not_utf8_are_read_as_bytes(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index + 1, 255, 254, 128]) * 50)
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
        ({"a.txt": b""}, "too little text"),
        ({"a.txt": b"short", "b.txt": b"shorter"}, "part.*17"),
        ({"a.txt": b"long enough for this" * 9, "b.txt": b"short"}, "(training|validation) part.*17"),
    ],
)
def test_corpora_that_are_too_small_are_refused(tmp_path, contents, match):
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=match):
        load_data(config(tmp_path / "*.txt"), 256)


def test_zero_bytes_are_refused_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text " * 20, encoding="utf-16-le")
    with pytest.raises(UserError, match=r"b\.txt.* 100; .* 1 of 2.*UTF-16"):
        load_byte_corpus(config(tmp_path / "*.txt"))


def test_validation_text_of_its_own(directory):
    options = config(directory / "[12]*.txt", validation_path=str(directory / "00[01].txt"))
    data = load_data(options, 256)
    train, validation = (documents(part.tokens) for (part,) in (data.training, data.validation))
    assert train == {file.read_bytes() for file in directory.glob("[12]*.txt")}
    assert validation == {file.read_bytes() for file in directory.glob("00[01].txt")}
    (directory / "000.txt").write_bytes(b"other text")
    assert load_data(options, 256).fingerprint != data.fingerprint


def test_a_dangling_link_is_no_file(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt"):
        load_byte_corpus(config(tmp_path / "gone.txt"))
