"""Corpora: the split is stable and does not leak, bytes are kept, wrong ones are named."""

from itertools import islice

import numpy as np
import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data import corpus_files, load_corpus, load_data
from ldm_jax.data.corpus import END_OF_DOCUMENT
from ldm_jax.data.windows import random_windows, spread_windows
from ldm_jax.errors import UserError


def documents(tokens):
    return set(tokens.tobytes().split(bytes([END_OF_DOCUMENT]))) - {b""}


@pytest.fixture
def folder(tmp_path, rng):
    for index in range(60):
        text = bytes(rng.integers(32, 127, size=100, dtype=np.uint8)) + b"\n"
        (tmp_path / f"{index:02}.txt").write_bytes(text)
    return tmp_path


def config(path, **options):
    return DataConfig(path=str(path), **{"context": 16, "validation_fraction": 0.2, **options})


def test_every_document_is_on_one_side(folder):
    corpus = load_corpus(config(folder / "*.txt"))
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert train | validation == {file.read_bytes() for file in folder.iterdir()}
    assert not train & validation
    assert 4 <= len(validation) <= 24  # 60 draws at .2: more than four standard deviations either way
    assert corpus.train.dtype == np.uint8


def test_split_does_not_depend_on_names_or_on_other_documents(folder):
    before = documents(load_corpus(config(folder / "*.txt")).validation)
    for file in list(folder.glob("0*.txt")):
        file.rename(folder / f"z{file.name}")  # other order
    (folder / "copy.txt").write_bytes((folder / "11.txt").read_bytes())  # a copy falls on the side of its original
    assert documents(load_corpus(config(folder / "*.txt")).validation) == before
    (folder / "new.txt").write_bytes(b"something new, long enough to be cut\n")
    after = documents(load_corpus(config(folder / "*.txt")).validation)
    assert after - {b"something new, long enough to be cut\n"} == before


def test_long_files_are_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = b"".join(b"line %d\n" % n for n in range(2000)) + b"x" * 5000 + b"\nno end"
    (tmp_path / "long.txt").write_bytes(text)
    corpus = load_corpus(config(tmp_path / "long.txt", document_bytes=1000))
    parts = documents(corpus.train) | documents(corpus.validation)
    assert sum(map(len, parts)) + 1000 * 4 >= len(text)  # equal parts of the x line count once
    assert all(len(part) <= 2000 for part in parts)
    assert sum(part.endswith(b"\n") for part in parts) >= len(parts) - 3
    assert len(corpus.validation) > 16


def test_one_short_file_can_be_cut(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"".join(b"line %d\n" % n for n in range(100)))
    with pytest.raises(UserError, match=r"has 1 document,.*data\.document_bytes"):
        load_corpus(config(tmp_path / "short.txt"))
    assert len(load_corpus(config(tmp_path / "short.txt", document_bytes=200)).validation) > 16


def test_files_that_are_not_utf8_are_read_as_bytes(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index + 1, 255, 254, 0, 128]) * 50)
    corpus = load_corpus(config(tmp_path / "*.bin"))
    assert {1, 2, 3, 4, 128, 254, 255} <= set(np.concatenate([corpus.train, corpus.validation]).tolist())


def test_patterns_go_into_folders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "deep.txt").write_text("deep")
    (tmp_path / "a" / "top.txt").write_text("top")
    found = corpus_files(DataConfig(path=f"{tmp_path}/**/*.txt"))
    assert [file.name for file in found] == ["deep.txt", "top.txt"]


def test_the_standard_library_is_sorted_and_only_itself():
    files = corpus_files(DataConfig())
    assert files == sorted(files)
    assert {"argparse.py", "dataclasses.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)


@pytest.mark.parametrize(
    ("contents", "options", "words"),
    [
        ({}, {}, "has no file"),
        ({"a.txt": b""}, {}, "has 0 documents"),
        ({"a.txt": b"short", "b.txt": b"shorter"}, {}, "bytes, but one window needs 17"),
        ({"a.txt": b"long enough for this" * 9, "b.txt": b"short"}, {}, "part of the corpus"),
    ],
)
def test_corpora_that_do_not_serve(tmp_path, contents, options, words):
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_corpus(config(tmp_path / "*.txt", **options))


def test_a_folder_is_not_a_pattern(tmp_path):
    with pytest.raises(UserError, match=r"a folder: say which files, as in .*\*\*/\*\.txt"):
        load_corpus(config(tmp_path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no file"):
        load_corpus(config(tmp_path / "gone.txt"))


def test_training_goes_on_where_it_stopped(folder):
    data = load_data(config(folder / "*.txt"), 256)
    whole = [batch.tokens for batch in islice(data.batches(0, 4, seed=3), 7)]
    later = [batch.tokens for batch in islice(data.batches(4 * 4, 4, seed=3), 3)]
    np.testing.assert_array_equal(whole[4:], later)
    assert whole[0].shape == (4, 17)
    assert whole[0].dtype == np.int32
    other = [batch.tokens for batch in islice(data.batches(0, 4, seed=4), 7)]
    assert not np.array_equal(whole, other)


def test_the_windows_of_a_seed_are_those_of_all_versions():
    # Runs that were begun with an earlier version go on with the same data.
    windows = random_windows(np.arange(200, dtype=np.uint8), 8, seed=3)
    assert [int(windows[index][0]) for index in range(8)] == [74, 104, 119, 99, 100, 53, 43, 9]


def test_training_windows_are_of_the_corpus_and_reach_all_of_it():
    every = random_windows(np.arange(40, dtype=np.uint8), 8, seed=0)
    windows = np.stack([every[index] for index in range(320)])
    np.testing.assert_array_equal(windows, windows[:, :1] + np.arange(9))
    assert set(windows[:, 0]) == set(range(32))  # 320 draws of 32 places: each is missed with 4e-5


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (3, [0, 15, 31]), (100, [0, 10, 20, 31])])
def test_validation_windows_are_spread_and_share_no_target(count, expected):
    windows = spread_windows(np.arange(40, dtype=np.uint8), 8, count)
    assert windows[:, 0].tolist() == expected[: len(windows)]
    assert len(np.unique(windows[:, 1:])) == windows[:, 1:].size
