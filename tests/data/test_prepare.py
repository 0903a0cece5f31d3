"""Preparing: what a corpus holds; broken off anywhere it ends with the same files; what is refused; what is damaged."""

import contextlib
import errno
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
from ldm_jax.data import load_prepared, read_tokenizer, train_bpe
from ldm_jax.data.preparation_folder import PreparationFolder
from ldm_jax.data.prepare import PrepareOptions, prepare
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
def test_a_corpus_holds_every_document_on_one_side(texts, lines, tmp_path, options):
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
    assert corpus.bytes_per_token == manifest["validation"]["text_bytes"] / manifest["validation"]["tokens"]
    assert f"{len(corpus.train):,} tokens of {len(train)} documents to train on" in output
    with pytest.raises(IndexError):
        corpus.train.document(len(train))


def test_the_split_does_not_depend_on_other_documents(texts, lines, tmp_path):
    prepared(tmp_path / "all", lines)
    few = write_lines(tmp_path / "few.jsonl", texts[100:160:-1] + texts[200:100:-1])
    prepared(tmp_path / "few", few, tokenizer="bpe", vocabulary=300, shard_tokens=300)
    held_out = decoded(load_prepared(tmp_path / "all"), "validation")
    assert set(decoded(load_prepared(tmp_path / "few"), "validation")) == {*texts[101:201]} & set(held_out)


def test_a_bpe_has_not_seen_the_validation_part(texts, tmp_path):
    secret = [text + " zyzzyva" * 50 for text in texts]
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


def test_empty_documents_are_left_out_and_strange_ones_counted(texts, tmp_path):
    for name, content in (("0.txt", b""), ("1.txt", b"caf\xe9 \xff"), ("2.txt", "ü".encode()), ("3.txt", b"\0")):
        (tmp_path / name).write_bytes(content)
    rows = write_lines(tmp_path / "a.jsonl", ["", None, *texts[:50]])
    output = prepared(tmp_path / "corpus", tmp_path / "*.txt", rows)
    assert "4 empty ones left out, 1 are not all UTF-8" in output
    corpus = load_prepared(tmp_path / "corpus")
    assert corpus.train.documents + corpus.validation.documents == 52
    every = [stream.document(n).tobytes() for stream in corpus[:2] for n in range(stream.documents)]
    assert b"caf\xe9 \xff" in every
    prepared(tmp_path / "bpe", tmp_path / "*.txt", rows, tokenizer="bpe", vocabulary=300)
    corpus = load_prepared(tmp_path / "bpe")
    assert "caf\ufffd \ufffd" in decoded(corpus, "train") + decoded(corpus, "validation")
    assert "\0" in decoded(corpus, "train") + decoded(corpus, "validation")


def test_a_finished_folder_is_left_alone(lines, tmp_path):
    prepared(tmp_path / "corpus", lines)
    before = contents(tmp_path / "corpus")
    os.utime(lines)
    assert prepared(tmp_path / "corpus", lines).count("\n") == 1
    assert contents(tmp_path / "corpus") == before
    with pytest.raises(UserError, match="was begun with column text, and it is now body"):
        prepared(tmp_path / "corpus", lines, column="body")
    assert contents(tmp_path / "corpus") == before


@pytest.mark.parametrize("what", ["replace", "fsync"])
def test_broken_off_anywhere_it_ends_with_the_same_files(lines, tmp_path, monkeypatch, what):
    """Before a file has its name, or before it is whole."""
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


def kill_after_files(command, folder, count):
    """Starts the command and kills it as soon as the folder has so many files; the files that it left."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        if folder.exists() and sum(1 for _ in folder.iterdir()) >= count:
            process.kill()
        time.sleep(0.001)
    process.communicate()
    return {file.name for file in folder.iterdir()}


@pytest.mark.slow
def test_killed_it_goes_on(tmp_path, rng):
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
IN_PART = OSError("1000 requested and 12 written")  # what NumPy says


def full(monkeypatch, after, error=NO_SPACE):
    """The disk is full from the `after`-th array on."""
    original, count = np.save, 0

    def save(file, array):
        nonlocal count
        count += 1
        if count >= after:
            file.write(b"half")
            raise error
        original(file, array)

    monkeypatch.setattr(np, "save", save)


@pytest.mark.parametrize(
    ("error", "why"), [(NO_SPACE, "No space left on device"), (IN_PART, "a file could be written only in part")]
)
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(lines, tmp_path, monkeypatch, error, why):
    prepared(tmp_path / "whole", lines)
    with monkeypatch.context() as patch:
        full(patch, 8, error)
        with pytest.raises(UserError, match=rf"cannot be written: {why}.*\. What is whole in it is kept"):
            prepared(tmp_path / "corpus", lines)
    assert not list((tmp_path / "corpus").glob("*.tmp"))
    assert "goes on after" in prepared(tmp_path / "corpus", lines)
    assert contents(tmp_path / "corpus") == contents(tmp_path / "whole")


def test_a_half_done_folder_takes_the_same_options_and_files_only(texts, tmp_path, monkeypatch):
    lines = write_lines(tmp_path / "lines.jsonl", texts)
    with monkeypatch.context() as patch:
        full(patch, 8)
        with pytest.raises(UserError):
            prepared(tmp_path / "corpus", lines)
    with pytest.raises(UserError, match="was begun with shard_tokens 2000, and it is now 1000"):
        prepared(tmp_path / "corpus", lines, shard_tokens=1000)
    with pytest.raises(UserError, match="holds no prepared corpus"):
        load_prepared(tmp_path / "corpus")
    written = lines.stat()
    for changed in ([*texts, "one more"], [*texts[1:], texts[0]]):  # the second has the same size
        write_lines(lines, changed)
        with pytest.raises(UserError, match=r"the files that .* was begun with have changed"):
            prepared(tmp_path / "corpus", lines)
    write_lines(lines, texts)
    os.utime(lines, ns=(written.st_atime_ns, written.st_mtime_ns))
    (tmp_path / "corpus" / "train-00000.tokens.npy").unlink()
    with pytest.raises(UserError, match=r"the shard .*train-00000\.tokens\.npy cannot be read"):
        prepared(tmp_path / "corpus", lines)
    (tmp_path / "corpus" / "progress.json").write_text('{"options": {')
    with pytest.raises(UserError, match=r"progress\.json is damaged"):
        prepared(tmp_path / "corpus", lines)


def test_folders_that_do_not_serve(lines, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds other files \(thesis\.tex\) and no corpus: give another --out"):
        prepared(tmp_path / "thesis", lines)
    assert [file.name for file in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match=r"cannot be written: Not a directory"):
        prepared(lines / "corpus", lines)
    with (
        PreparationFolder(tmp_path / "busy"),
        pytest.raises(UserError, match="another process is preparing"),
    ):
        prepared(tmp_path / "busy", lines)


@pytest.mark.parametrize("documents", [[], [""], ["only one"]])
def test_too_few_documents_are_told_and_refused_in_training(tmp_path, documents):
    output = prepared(tmp_path / "corpus", write_lines(tmp_path / "a.jsonl", documents))
    assert "note: a part of the corpus has no document, so nothing can be trained on it" in output
    with pytest.raises(UserError, match=r"has no document in its (train|validation) part"):
        load_prepared(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"files": ()}, "give either files or a dataset"),
        ({"dataset": "x"}, "give either files or a dataset"),
        ({"vocabulary": 256}, "vocabulary is 256, but it must be at least 257"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0, but it must lie between 0 and 1"),
    ],
)
def test_options_that_do_not_serve(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        PrepareOptions(**{"files": ("a.txt",)} | options)


def test_a_start_that_wrote_no_shard_is_in_no_ones_way(lines, tmp_path):
    with pytest.raises(UserError, match="there is no tokenizer bpee: give bytes, bpe, or the path"):
        prepared(tmp_path / "corpus", lines, tokenizer="bpee")
    with pytest.raises(UserError, match='has no column "body"'):
        prepared(tmp_path / "corpus", lines, column="body")
    prepared(tmp_path / "corpus", lines, tokenizer="bpe", vocabulary=300)
    prepared(tmp_path / "new", lines, tokenizer="bpe", vocabulary=300)
    assert contents(tmp_path / "corpus") == contents(tmp_path / "new")


def damage(folder, how):
    tokens = sorted(folder.glob("train-*.tokens.npy"))
    match how:
        case "flip":
            content = bytearray(tokens[1].read_bytes())
            content[-100] ^= 1
            tokens[1].write_bytes(content)
        case "cut":
            tokens[1].write_bytes(tokens[1].read_bytes()[:-1])
        case "swap":
            tokens[1].rename(folder / "x")
            tokens[2].rename(tokens[1])
            (folder / "x").rename(tokens[2])
        case "gone":
            tokens[1].unlink()
        case "ends":
            file = folder / "train-00001.ends.npy"
            file.write_bytes(file.read_bytes()[:-1] + b"\1")
        case "half":
            file = folder / "corpus.json"
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "format":
            file = folder / "corpus.json"
            file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
        case "list":
            (folder / "corpus.json").write_text("[]")
        case "tokenizer":
            file = folder / "tokenizer.json"
            file.write_bytes(file.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flip", r"train-00001\.tokens\.npy has other content than was written"),
        ("cut", r"train-00001\.tokens\.npy has [\d,]+ bytes, but [\d,]+ were written"),
        ("swap", r"train-0000[12]\.tokens\.npy has "),
        ("gone", r"train-00001\.tokens\.npy cannot be read \(No such file"),
        ("ends", r"train-00001\.ends\.npy has other content"),
        ("half", r"corpus\.json is damaged"),
        ("format", r"corpus\.json is of another format than 1"),
        ("list", r"corpus\.json is damaged"),
        ("tokenizer", r"tokenizer\.json is not the file that was saved there"),
    ],
)
def test_damage_is_found_and_named(lines, tmp_path, how, words):
    prepared(tmp_path / "corpus", lines, tokenizer="bpe", vocabulary=300)
    load_prepared(tmp_path / "corpus")
    damage(tmp_path / "corpus", how)
    with pytest.raises(UserError, match=words):
        load_prepared(tmp_path / "corpus")
    if how in ("flip", "ends"):
        load_prepared(tmp_path / "corpus", verify=False)
    elif how in ("cut", "gone"):
        with pytest.raises(UserError, match=words):
            load_prepared(tmp_path / "corpus", verify=False)


def test_progress_can_be_read_in_a_log(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ldm_jax.data.preparation_line.SECONDS", 0.0)
    for part in range(2):
        write_lines(tmp_path / f"{part}.jsonl", texts[part * 150 : part * 150 + 150])
    text = prepared(tmp_path / "corpus", tmp_path / "*.jsonl")
    assert "\x1b" not in text
    assert re.search(r"\d shards  [\d,]+ tokens  [\d,]+ tokens/s  5\d%  0:00:00 left\n", text)
    prepare(PrepareOptions((f"{tmp_path}/*.jsonl",)), tmp_path / "terminal", Console(force_terminal=True, width=100))
    assert " tokens/s" in capsys.readouterr().out
