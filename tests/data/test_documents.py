"""Documents: every format gives the same texts, from any position on; errors name the file and line."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import words, write_lines
from ldm_jax.data import documents
from ldm_jax.data.documents import FileSource, HubSource, matching_files
from ldm_jax.errors import UserError


def texts(source, position=None):
    return [text for batch in source.batches(position) for text in batch.texts]


def zst(file, content):
    with pa.output_stream(str(file), compression="zstd") as stream:
        stream.write(content)


def write(directory, kind, documents):
    """Writes documents in a format; returns the pattern of the files."""
    lines = write_lines(directory / "a.jsonl", documents).read_bytes()
    match kind:
        case "jsonl.gz":
            (directory / "a.jsonl.gz").write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))
        case "jsonl.zst":
            zst(directory / "a.jsonl.zst", lines)
        case "parquet":
            pq.write_table(
                pa.table({"id": range(len(documents)), "text": documents}), directory / "a.parquet", row_group_size=7
            )
        case "txt" | "txt.gz":
            for index, text in enumerate(documents):
                content = text.encode()
                (directory / f"{index:03}.{kind}").write_bytes(gzip.compress(content) if kind == "txt.gz" else content)
    return f"{directory}/*.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "txt.gz"])
def test_every_format_from_any_position_on(tmp_path, rng, monkeypatch, kind):
    expected = [*words(rng, 40), ""]
    source = FileSource([write(tmp_path, kind, expected)], "text")
    monkeypatch.setattr(documents, "BATCH_DOCUMENTS", 3)
    assert texts(source) == expected
    assert sorted(source.sample()) == sorted(expected)
    batches = list(source.batches(None))
    for number in (1, 5, len(batches)):
        position = json.loads(json.dumps(batches[number - 1].next_position))
        assert list(source.batches(position)) == batches[number:]


def test_a_data_set_from_any_position_on(tmp_path, rng, monkeypatch):
    expected = words(rng, 40)
    for part in range(2):  # a directory with the layout of the hub
        pq.write_table(pa.table({"text": expected[part * 20 : part * 20 + 20]}), tmp_path / f"train-{part}.parquet")
    source = HubSource(str(tmp_path), None, "train", None, "text")
    monkeypatch.setattr(documents, "BATCH_DOCUMENTS", 3)
    assert list(source.sample()) == expected
    batches = list(source.batches(None))
    assert [text for batch in batches for text in batch.texts] == expected
    for number in (1, 5, len(batches)):
        position = json.loads(json.dumps(batches[number - 1].next_position))
        assert [batch.texts for batch in source.batches(position)] == [batch.texts for batch in batches[number:]]
    with pytest.raises(UserError, match=r'"body".*--column \(text\)'):
        texts(HubSource(str(tmp_path), None, "train", None, "body"))
    with pytest.raises(UserError, match="data set"):
        texts(HubSource(str(tmp_path), None, "test", None, "text"))


def test_batches_are_bounded_in_characters_too(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 100)
    source = FileSource([str(write_lines(tmp_path / "a.jsonl", ["x" * 60] * 5))], "text")
    assert [len(batch.texts) for batch in source.batches(None)] == [2, 2, 1]


def test_files_are_read_once_and_in_order_and_can_be_cut(tmp_path):
    for name, text in (("b.txt", "2"), ("a.txt", "1\n1\n1\n")):
        (tmp_path / name).write_text(text)
    assert texts(FileSource([f"{tmp_path}/b.*", f"{tmp_path}/*.txt"], "text")) == ["1\n1\n1\n", "2"]
    assert texts(FileSource([f"{tmp_path}/*.txt"], "text", document_bytes=3)) == ["1\n1\n", "1\n", "2"]


def test_text_keeps_every_byte(tmp_path):
    content = b"caf\xe9\r\n\xff\0end"
    (tmp_path / "a.txt").write_bytes(content)
    assert texts(FileSource([str(tmp_path / "a.txt")], "text"))[0].encode(errors="surrogateescape") == content


def test_nulls_and_empty_lines_are_empty_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": "a", "b": [1]}\n{"b": {}, "text": ""}\n{"text": "z"}')
    assert texts(FileSource([str(tmp_path / "a.jsonl")], "text")) == ["", "", "a", "", "z"]
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    assert texts(FileSource([str(tmp_path / "a.parquet")], "text")) == ["a", ""]


def whole(name):
    content = json.dumps({"text": "a" * 50}).encode() + b"\n"
    return gzip.compress(content * 50, mtime=0) if name.endswith("gz") else content


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops\n', r"line 2 of .*a\.jsonl"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r"line 2 of .*a\.jsonl.*object"),
        ("a.json", b'[\n{"text": "x"}\n]', r"line 1 of .*a\.json"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', r'line 2 of .*"text".*--column \(txt\)'),
        ("a.jsonl", b'{"text": 5}\n', r'line 1 of .* 5 .*"text".*string'),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz.*gzip"),
        ("a.jsonl.gz", whole("gz")[:-9], r"a\.jsonl\.gz.*ended"),
        ("a.jsonl.gz", whole("gz")[:15] + b"xxxx" + whole("gz")[19:], r"a\.jsonl\.gz"),
        ("a.jsonl.zst", b"no zstd", r"a\.jsonl\.zst.*ZSTD"),
        ("a.parquet", b"no parquet", r"a\.parquet"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=match):
        texts(FileSource([str(tmp_path / name)], "text"))


def test_a_truncated_zst_file_is_refused(tmp_path, rng):
    file = tmp_path / "a.txt.zst"
    zst(file, rng.bytes(300_000))
    file.write_bytes(file.read_bytes()[:200_000])
    with pytest.raises(UserError, match=r"a\.txt\.zst.*Truncated"):
        texts(FileSource([str(file)], "text"))


def test_parquet_columns(tmp_path):
    pq.write_table(pa.table({"id": [1, 2], "body": ["a", "b"]}), tmp_path / "a.parquet")
    assert texts(FileSource([str(tmp_path / "a.parquet")], "body")) == ["a", "b"]
    with pytest.raises(UserError, match=r'a\.parquet.*"text".*\(id, body\)'):
        texts(FileSource([str(tmp_path / "a.parquet")], "text"))
    with pytest.raises(UserError, match=r'a\.parquet has 1 .*"id".*string'):
        texts(FileSource([str(tmp_path / "a.parquet")], "id"))
    pq.write_table(pa.table({"id": []}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r'none\.parquet.*"text"'):
        texts(FileSource([str(tmp_path / "none.parquet")], "text"))


def test_a_pattern_without_a_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r'".*\*\.text"'):
        FileSource([f"{tmp_path}/*.txt", f"{tmp_path}/*.text"], "text")
    with pytest.raises(UserError, match=r"\[\[\]"):
        matching_files(f"{tmp_path}/b[1]/*.txt")
    with pytest.raises(UserError, match=r"directory.*/\*\*/\*\.txt"):
        matching_files(str(tmp_path))


def test_brackets_and_the_home_directory_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a [1].txt", "a 1.txt"):
        (tmp_path / name).write_text("a")
    assert matching_files("~/a [1].txt") == [tmp_path / "a [1].txt"]
    assert matching_files("~/a *.txt") == [tmp_path / "a 1.txt", tmp_path / "a [1].txt"]


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "\ufeffb"}\n', encoding="utf-8-sig")
    assert texts(FileSource([str(tmp_path / "a.jsonl")], "text")) == ["a", "\ufeffb"]
