"""Preparation: content of a corpus, resuming after any interruption, errors, damaged files."""

import contextlib
import errno
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from corpora import contents, prepared, words, write_lines
from ldm_jax import files
from ldm_jax.config import DataConfig
from ldm_jax.data import load_data, load_prepared, read_tokenizer, train_bpe
from ldm_jax.data.preparation import PreparationDirectory, PrepareOptions, prepare
from ldm_jax.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


@pytest.fixture(scope="module")
def texts():
    return words(np.random.default_rng(0), 300)


@pytest.fixture(scope="module")
def lines(texts, tmp_path_factory):
    """The documents as JSON lines."""
    return write_lines(tmp_path_factory.mktemp("text") / "lines.jsonl", texts)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr("ldm_jax.data.documents.BATCH_DOCUMENTS", 7)


def decoded(corpus, part):
    stream = getattr(corpus, part)
    return [corpus.tokenizer.decode(stream.document(index)).decode() for index in range(stream.documents)]


@pytest.mark.parametrize("options", [{}, {"tokenizer": "bpe", "vocabulary": 300}])
def test_every_document_is_in_one_part(texts, lines, tmp_path, options):
    output = prepared(tmp_path / "corpus", lines, **options)
    corpus = load_prepared(tmp_path / "corpus")
    train, validation = decoded(corpus, "train"), decoded(corpus, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in the order of the source
    assert 30 <= len(validation) <= 95  # 300 draws at .2, four standard deviations and more
    manifest = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    assert len(manifest["train"]["shards"]) > 4
    for part in ("train", "validation"):
        stream, table = getattr(corpus, part), manifest[part]
        tokens = stream[0 : len(stream)]
        assert tokens.dtype == manifest["dtype"] == ("uint16" if options else "uint8")
        assert (table["tokens"], table["documents"]) == (len(stream), stream.documents)
        assert table["text_bytes"] == sum(len(text.encode()) for text in decoded(corpus, part))
        assert np.sum(tokens == corpus.tokenizer.end_of_document) == stream.documents
        for start, stop in [(0, 5), (1990, 2300), (len(stream) - 3, len(stream)), (7, 7)]:
            np.testing.assert_array_equal(stream[start:stop], tokens[start:stop])
    table = manifest["validation"]
    assert corpus.bytes_per_token == table["text_bytes"] / (table["tokens"] - table["documents"])
    assert f"{len(corpus.train):,} tokens in {len(train)} documents" in output
    with pytest.raises(IndexError):
        corpus.train.document(len(train))


def test_the_split_does_not_depend_on_other_documents(texts, lines, tmp_path):
    prepared(tmp_path / "all", lines)
    few = write_lines(tmp_path / "few.jsonl", texts[100:160:-1] + texts[200:100:-1])
    prepared(tmp_path / "few", few, tokenizer="bpe", vocabulary=300, shard_tokens=300)
    held_out = decoded(load_prepared(tmp_path / "all"), "validation")
    assert set(decoded(load_prepared(tmp_path / "few"), "validation")) == {*texts[101:201]} & set(held_out)


def test_a_bpe_is_not_trained_on_the_validation_part(texts, tmp_path):
    secret = [text + " zyzzyva" * 50 for text in texts[:100]]
    prepared(tmp_path / "all", write_lines(tmp_path / "a.jsonl", secret))
    held_out = set(decoded(load_prepared(tmp_path / "all"), "validation"))
    clear = [text if text in held_out else text.replace(" zyzzyva", "") for text in secret]
    prepared(tmp_path / "bpe", write_lines(tmp_path / "b.jsonl", clear), tokenizer="bpe", vocabulary=400)
    assert len(load_prepared(tmp_path / "bpe").tokenizer.encode(" zyzzyva")) > 4


def test_a_tokenizer_of_a_file_is_copied(texts, lines, tmp_path):
    (tmp_path / "given").mkdir()
    train_bpe(texts, 350).save(tmp_path / "given")
    file = tmp_path / "given" / "tokenizer.json"
    prepared(tmp_path / "corpus", lines, tokenizer=str(file))
    assert (tmp_path / "corpus" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert load_prepared(tmp_path / "corpus").tokenizer.fingerprint == read_tokenizer(file).fingerprint


def test_empty_documents_are_skipped_and_invalid_ones_counted(texts, tmp_path):
    for name, content in (("0.txt", b""), ("1.txt", b"caf\xe9 \xff"), ("2.txt", "ü".encode())):
        (tmp_path / name).write_bytes(content)
    rows = write_lines(tmp_path / "a.jsonl", ["", None, *texts[:50]])
    output = prepared(tmp_path / "corpus", tmp_path / "*.txt", rows)
    assert re.search(r", 3 empty .*, 1 not .*UTF-8", output)
    corpus = load_prepared(tmp_path / "corpus")
    assert corpus.train.documents + corpus.validation.documents == 52
    every = [stream.document(n).tobytes() for stream in corpus[:2] for n in range(stream.documents)]
    assert b"caf\xe9 \xff" in every
    (tmp_path / "3.txt").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"zero bytes \(1\)"):
        prepared(tmp_path / "zeros", tmp_path / "*.txt", rows)
    prepared(tmp_path / "bpe", tmp_path / "*.txt", rows, tokenizer="bpe", vocabulary=300)
    corpus = load_prepared(tmp_path / "bpe")
    assert "caf\ufffd \ufffd" in decoded(corpus, "train") + decoded(corpus, "validation")
    assert "\0" in decoded(corpus, "train") + decoded(corpus, "validation")


def test_a_finished_corpus_is_not_changed(lines, tmp_path):
    prepared(tmp_path / "corpus", lines)
    before = contents(tmp_path / "corpus")
    os.utime(lines)
    assert prepared(tmp_path / "corpus", lines).count("\n") == 1
    assert contents(tmp_path / "corpus") == before
    with pytest.raises(UserError, match=r"column text.*body"):
        prepared(tmp_path / "corpus", lines, column="body")
    assert contents(tmp_path / "corpus") == before


@pytest.mark.parametrize("what", ["replace", "fsync"])
def test_interrupted_anywhere_it_resumes_to_the_same_files(lines, tmp_path, monkeypatch, what):
    """Interrupts before a file is renamed, or before it is flushed."""
    options = {"tokenizer": "bpe", "vocabulary": 300}
    prepared(tmp_path / "whole", lines, **options)
    whole = contents(tmp_path / "whole")
    assert len(whole) > 20
    broken = tmp_path / "broken"
    original = getattr(os, what) if what == "fsync" else Path.replace

    starts = 0
    while not (broken / "corpus.json").exists():
        starts, left = starts + 1, 2 + starts % 5  # files that are written on this start

        def breaking(*arguments):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return original(*arguments)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(files.os if what == "fsync" else Path, what, breaking)
            prepared(broken, lines, **options)
        assert starts < 100
    assert starts > 10
    prepared(broken, lines, **options)
    assert contents(broken) == whole


def kill_after_files(command, directory, count):
    """Starts the command, kills it when the directory has so many files, and returns their names."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        if directory.exists() and sum(1 for _ in directory.iterdir()) >= count:
            process.kill()
        time.sleep(0.001)
    process.communicate()
    return {file.name for file in directory.iterdir()}


@pytest.mark.slow
def test_killed_it_resumes(tmp_path, rng):
    lines = write_lines(tmp_path / "lines.jsonl", words(rng, 30_000, longest=20))
    common = [sys.executable, str(SCRIPT), "--files", str(lines), "--shard-tokens", "10000", "--out"]
    common = [*common[:2], "--tokenizer", "bpe", "--vocabulary", "300", *common[2:]]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*common, str(whole)], check=True, capture_output=True)
    left = [kill_after_files([*common, str(broken)], broken, count) for count in (1, 4, 7, 12, 25)]
    assert all("corpus.json" not in names for names in left)
    subprocess.run([*common, str(broken)], check=True, capture_output=True)
    assert contents(broken) == contents(whole)


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
IN_PART = OSError("1000 requested and 12 written")  # NumPy's error


def full(monkeypatch, after, error=NO_SPACE):
    """Makes the disk full from the `after`-th array on."""
    original, count = np.save, 0

    def save(file, array):
        nonlocal count
        count += 1
        if count >= after:
            file.write(b"half")
            raise error
        original(file, array)

    monkeypatch.setattr(np, "save", save)


@pytest.mark.parametrize(("error", "why"), [(NO_SPACE, "No space left on device"), (IN_PART, "written only in part")])
def test_a_full_disk_is_one_error_and_nothing_is_lost(lines, tmp_path, monkeypatch, error, why):
    prepared(tmp_path / "whole", lines)
    with monkeypatch.context() as patch:
        full(patch, 8, error)
        with pytest.raises(UserError, match=why):
            prepared(tmp_path / "corpus", lines)
    assert not list((tmp_path / "corpus").glob("*.tmp"))
    assert re.search(r"after [1-9][\d,]* tokens", prepared(tmp_path / "corpus", lines))  # not from the start
    assert contents(tmp_path / "corpus") == contents(tmp_path / "whole")


def test_resuming_needs_the_same_options_and_files(texts, tmp_path, monkeypatch):
    lines = write_lines(tmp_path / "lines.jsonl", texts)
    with monkeypatch.context() as patch:
        full(patch, 8)
        with pytest.raises(UserError):
            prepared(tmp_path / "corpus", lines)
    with pytest.raises(UserError, match=r"shard_tokens 2000.* 1000"):
        prepared(tmp_path / "corpus", lines, shard_tokens=1000)
    with pytest.raises(UserError, match="no prepared corpus"):
        load_prepared(tmp_path / "corpus")
    written = lines.stat()
    for changed in ([*texts, "one more"], [*texts[1:], texts[0]]):  # the second has the same size
        write_lines(lines, changed)
        with pytest.raises(UserError, match=r"files of .*corpus have changed"):
            prepared(tmp_path / "corpus", lines)
    write_lines(lines, texts)
    os.utime(lines, ns=(written.st_atime_ns, written.st_mtime_ns))
    (tmp_path / "corpus" / "train-00000.tokens.npy").unlink()
    with pytest.raises(UserError, match=r"train-00000\.tokens\.npy"):
        prepared(tmp_path / "corpus", lines)
    (tmp_path / "corpus" / "progress.json").write_text('{"options": {')
    with pytest.raises(UserError, match=r"progress\.json"):
        prepared(tmp_path / "corpus", lines)


def test_other_directories_are_refused(lines, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex.*--out"):
        prepared(tmp_path / "thesis", lines)
    assert [file.name for file in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="Not a directory"):
        prepared(lines / "corpus", lines)
    with (
        PreparationDirectory(tmp_path / "busy"),
        pytest.raises(UserError, match=r"another process.*busy"),
    ):
        prepared(tmp_path / "busy", lines)


@pytest.mark.parametrize("documents", [[], [""], ["only one"]])
def test_a_corpus_without_a_part_is_reported_and_refused(tmp_path, documents):
    output = prepared(tmp_path / "corpus", write_lines(tmp_path / "a.jsonl", documents))
    assert re.search(r"note: (there is no training text|nothing is held out)", output)
    with pytest.raises(UserError, match=r"(training|validation) part.* 0 tokens"):
        load_data(DataConfig(corpora=(str(tmp_path / "corpus"),), context=4), 256)


@pytest.mark.parametrize(("fraction", "part"), [(1e-9, "validation"), (1 - 1e-9, "train")])
@pytest.mark.parametrize("shard_tokens", [1, 10_000])
def test_a_document_is_moved_to_a_part_that_would_be_empty(texts, tmp_path, fraction, part, shard_tokens):
    lines = write_lines(tmp_path / "a.jsonl", texts[:12])
    output = prepared(tmp_path / "corpus", lines, validation_fraction=fraction, shard_tokens=shard_tokens)
    assert f"{part} part would be empty" in output
    corpus = load_prepared(tmp_path / "corpus")
    assert getattr(corpus, part).documents == 1
    assert sorted(decoded(corpus, "train") + decoded(corpus, "validation")) == sorted(texts[:12])


def test_everything_or_nothing_can_be_held_out(texts, tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", texts[:12])
    for fraction, part in ((0.0, "train"), (1.0, "validation")):
        assert "note:" not in prepared(tmp_path / part, lines, validation_fraction=fraction)
        assert decoded(load_prepared(tmp_path / part), part) == texts[:12]
    assert "validation_fraction is 0.5" in prepared(
        tmp_path / "few", write_lines(tmp_path / "b.jsonl", ["a" * 99, "b", "c"]), validation_fraction=0.5
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"files": ()}, "files or a dataset"),
        ({"dataset": "x"}, "files or a dataset"),
        ({"vocabulary": 256}, r"vocabulary is 256.* 257"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"validation_fraction": -0.1}, r"validation_fraction is -0\.1"),
        ({"validation_fraction": 1.0, "tokenizer": "bpe"}, r"validation_fraction is 1.*tokenizer\.json"),
    ],
)
def test_invalid_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        PrepareOptions(**{"files": ("a.txt",)} | options)


def test_a_preparation_without_a_shard_is_replaced(lines, tmp_path):
    with pytest.raises(UserError, match=r"tokenizer.* bpee.*bytes, bpe"):
        prepared(tmp_path / "corpus", lines, tokenizer="bpee")
    with pytest.raises(UserError, match='no column "body"'):
        prepared(tmp_path / "corpus", lines, column="body")
    prepared(tmp_path / "corpus", lines, tokenizer="bpe", vocabulary=300)
    prepared(tmp_path / "new", lines, tokenizer="bpe", vocabulary=300)
    assert contents(tmp_path / "corpus") == contents(tmp_path / "new")


def damage(directory, how):
    tokens = sorted(directory.glob("train-*.tokens.npy"))
    match how:
        case "flip":
            content = bytearray(tokens[1].read_bytes())
            content[-100] ^= 1
            tokens[1].write_bytes(content)
        case "cut":
            tokens[1].write_bytes(tokens[1].read_bytes()[:-1])
        case "swap":
            tokens[1].rename(directory / "x")
            tokens[2].rename(tokens[1])
            (directory / "x").rename(tokens[2])
        case "gone":
            tokens[1].unlink()
        case "ends":
            file = directory / "train-00001.ends.npy"
            file.write_bytes(file.read_bytes()[:-1] + b"\1")
        case "half":
            file = directory / "corpus.json"
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "edited":
            file = directory / "corpus.json"
            file.write_text(re.sub(r'"text_bytes": \d+', '"text_bytes": 7', file.read_text()))
        case "format":
            file = directory / "corpus.json"
            file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
        case "list":
            (directory / "corpus.json").write_text("[]")
        case "tokenizer":
            file = directory / "tokenizer.json"
            file.write_bytes(file.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("flip", r"train-00001\.tokens\.npy.*checksum"),
        ("cut", r"train-00001\.tokens\.npy.* [\d,]+ bytes"),
        ("swap", r"train-0000[12]\.tokens\.npy"),
        ("gone", r"train-00001\.tokens\.npy.*No such file"),
        ("ends", r"train-00001\.ends\.npy.*checksum"),
        ("half", r"corpus\.json"),
        ("edited", r"corpus\.json.*checksum"),
        ("format", r"corpus\.json.*format 2.* 1"),
        ("list", r"corpus\.json"),
        ("tokenizer", r"tokenizer\.json"),
    ],
)
def test_damage_is_found_and_named(lines, tmp_path, how, match):
    prepared(tmp_path / "corpus", lines, tokenizer="bpe", vocabulary=300)
    load_prepared(tmp_path / "corpus")
    damage(tmp_path / "corpus", how)
    with pytest.raises(UserError, match=match):
        load_prepared(tmp_path / "corpus")
    if how in ("flip", "ends"):
        load_prepared(tmp_path / "corpus", verify=False)
    elif how in ("cut", "gone"):
        with pytest.raises(UserError, match=match):
            load_prepared(tmp_path / "corpus", verify=False)


def test_progress_is_printed_in_a_log_and_in_a_terminal(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("time.monotonic", itertools.count(0.0, 30.0).__next__)
    for part in range(2):
        write_lines(tmp_path / f"{part}.jsonl", texts[part * 150 : part * 150 + 150])
    text = prepared(tmp_path / "corpus", tmp_path / "*.jsonl")
    assert "\x1b" not in text
    assert re.search(r"\d shards  [\d,]+ tokens  [\d,]+ tokens/s  5\d%  0:\d\d:\d\d left\n", text)
    prepare(PrepareOptions((f"{tmp_path}/*.jsonl",)), tmp_path / "terminal", Console(force_terminal=True, width=100))
    assert " tokens/s" in capsys.readouterr().out
