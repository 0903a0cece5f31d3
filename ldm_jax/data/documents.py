"""Documents: where they are read from, how long texts are cut, and which documents are held out."""

import codecs
import glob
import gzip
import hashlib
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ldm_jax.errors import UserError

BATCH_DOCUMENTS = 4096
BATCH_CHARACTERS = 4_000_000
SPLIT_RULE = (
    "held out: documents whose BLAKE2b hash of 8 bytes, as a number, is below fraction * 2^64; if one part has none of "
    "several documents, one is moved to it"
)

NEAR = 1.5
"""A held-out share within this factor of the wanted fraction is near it."""

Position = Any
"""Where to resume reading: a JSON value that only its source interprets. None is the start."""


def cut(text: bytes, size: int) -> Iterator[bytes]:
    """Cuts a text into pieces of `size` to `2 * size` bytes, each at the first line end after `size` bytes.

    Where there is no line end within `2 * size` bytes, the piece has exactly `size` bytes.
    """
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", start + size - 1, start + 2 * size)
        end = line_end + 1 if line_end >= 0 else start + size
        yield text[start:end]
        start = end


def content_hash(document: bytes) -> bytes:
    """The 8-byte hash of a document that decides whether it is held out."""
    return hashlib.blake2b(document, digest_size=8).digest()


def is_validation(digest: bytes, fraction: float) -> bool:
    """Whether a document with this hash is held out. A document and its copies are always in the same part."""
    return int.from_bytes(digest) < fraction * 2**64


def is_near(share: float, fraction: float) -> bool:
    """Whether both parts of a text are near the sizes that were wanted."""
    parts = (share, fraction), (1 - share, 1 - fraction)
    return all(wanted / NEAR <= size <= wanted * NEAR for size, wanted in parts)


def share_warning(share: float, fraction: float) -> str | None:
    """A sentence, without its full stop, if the held-out share of a text is not near `fraction`."""
    if is_near(share, fraction):
        return None
    return f"{share:.1%} of the text is held out, but validation_fraction is {fraction}"


def matching_files(pattern: str) -> list[Path]:
    """The files of a path or pattern, sorted; `**` and `~` are expanded. Raises UserError for none, or a directory."""
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        example = os.path.join(pattern, "**", "*.txt")
        raise UserError(f'"{pattern}" is a directory: give a pattern of files, such as "{example}".')
    files = [path] if os.path.isfile(path) else filter(os.path.isfile, glob.glob(path, recursive=True))
    if not (matches := [Path(file) for file in sorted(files)]):
        hint = " In a pattern, [[] stands for the character [." if "[" in pattern else ""
        raise UserError(
            f'no file matches "{pattern}" in {os.getcwd()}: give files, or a pattern such as "books/**/*.txt".{hint}'
        )
    return matches


class DocumentBatch(NamedTuple):
    """Consecutive documents. An empty text stands for a row without text."""

    texts: list[str]
    """Bytes that are not valid UTF-8 are represented as by the error handler `surrogateescape`."""
    next_position: Position


class DocumentSource:
    """Documents in a fixed order."""

    fingerprint: str
    """Changes when the source changes, as far as that can be seen without reading all of it."""

    def batches(self, position: Position) -> Iterator[DocumentBatch]:
        """All documents from a position on, in batches that are worth tokenizing in parallel.

        Resuming at a batch's `next_position` gives the documents that follow it.
        """
        texts, characters, position_after = [], 0, None
        for text, position_after in self.documents(position):
            texts.append(text)
            characters += len(text)
            if len(texts) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield DocumentBatch(texts, position_after)
                texts, characters = [], 0
        if texts:
            yield DocumentBatch(texts, position_after)

    def documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        """All documents from a position on, each with the position after it."""
        raise NotImplementedError

    def done(self, position: Position) -> float | None:
        """The approximate fraction of the source before a position; None if it is unknown."""
        del position

    def sample(self) -> Iterator[str]:
        """Documents to train a tokenizer on, in a fixed order."""
        return (text for text, _ in self.documents(None))


class FileSource(DocumentSource):
    """Documents from files, in the order of the file names.

    Each row of a `.jsonl` (`.json`, `.ndjson`) or `.parquet` file is a document; any other file is one document. `.gz`
    and `.zst` files are decompressed.

    Args:
        patterns: paths, or patterns such as `books/*.txt`; `**` matches subdirectories.
        column: name of the text column in JSON lines and Parquet files.
        document_bytes: text files are cut at line ends into documents of about this size. None: they are not cut.

    Raises:
        UserError: a pattern matches no file, or is a directory.
    """

    def __init__(self, patterns: Sequence[str], column: str, document_bytes: int | None = None):
        self._files = sorted({file for pattern in patterns for file in matching_files(pattern)}, key=str)
        self._column, self._document_bytes = column, document_bytes
        stats = [file.stat() for file in self._files]
        self._sizes = [stat.st_size for stat in stats]
        stamps = (f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in zip(self._files, stats, strict=True))
        self.fingerprint = hashlib.blake2b("\n".join(stamps).encode(errors="surrogateescape")).hexdigest()[:16]

    def documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        """All documents from a position `[file, row]` on."""
        first_file, first_row = position or (0, 0)
        for number, file in enumerate(self._files[first_file:], first_file):
            start = first_row if number == first_file else 0
            for row, text in enumerate(islice(self._rows(file), start, None), start):
                yield text, [number, row + 1]

    def done(self, position: Position) -> float:
        """The fraction of all bytes that are in files before the position's."""
        return sum(self._sizes[: position[0]]) / max(sum(self._sizes), 1)

    def sample(self) -> Iterator[str]:
        """The documents, with the files in an order that does not depend on the sorting of their names."""
        for file in sorted(self._files, key=lambda file: hashlib.blake2b(os.fsencode(file)).digest()):
            yield from self._rows(file)

    def _rows(self, file: Path) -> Iterator[str]:
        suffixes = [suffix for suffix in file.suffixes if suffix not in (".gz", ".zst")]
        kind = suffixes[-1] if suffixes else ""
        try:
            if kind == ".parquet":
                yield from _parquet_rows(file, self._column)
            elif kind in (".jsonl", ".json", ".ndjson"):
                with _open(file) as lines:
                    for number, line in enumerate(lines, 1):
                        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                        yield _json_row(line, f"line {number} of {file}", self._column)
            else:
                with _open(file) as content:
                    text = content.read()
                parts = [text] if self._document_bytes is None else cut(text, self._document_bytes)
                yield from (part.decode(errors="surrogateescape") for part in parts)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} cannot be read: {error}.") from error


class HubSource(DocumentSource):
    """Rows of a data set on the Hugging Face hub, or of a local directory with the same layout, read as a stream.

    Its sample is the start of the stream: a sample of the whole stream would take as long as reading all of it.

    Raises:
        UserError: the library `datasets` is missing. When read: the data set cannot be opened.
    """

    def __init__(self, name: str, subset: str | None, split: str, revision: str | None, column: str):
        self._name, self._column = os.path.expanduser(name), column
        self._load = _optional_library("datasets").load_dataset
        self._options = {"name": subset, "split": split, "revision": revision, "streaming": True}
        self.fingerprint = f"{name} {subset} {split} {revision}"

    def documents(self, position: Position) -> Iterator[tuple[str, Position]]:
        """All documents from a state of the stream on."""
        try:
            rows = self._load(self._name, **self._options)
            if position is not None:
                rows.load_state_dict(position)
            for row in rows:
                yield _row_text(row, self._column, f"the data set {self._name}"), rows.state_dict()
        except UserError:
            raise
        except Exception as error:  # the library raises a dozen types
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")
            raise UserError(f"the data set {self._name} cannot be read: {why}.") from error


def _open(file: Path) -> io.BufferedIOBase:
    match file.suffix:
        case ".gz":
            return gzip.open(file)
        case ".zst":  # by Arrow, because zstandard's reader does not detect a truncated frame
            return io.BufferedReader(_optional_library("pyarrow").input_stream(str(file), compression="zstd"))
        case _:
            return file.open("rb")


def _json_row(line: bytes, where: str, column: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object, but every line must be one.")
    return _row_text(row, column, where)


def _parquet_rows(file: Path, column: str) -> Iterator[str]:
    parquet = _optional_library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            _row_text(dict.fromkeys(table.schema_arrow.names), column, str(file))
            for batch in table.iter_batches(1024, columns=[column]):
                for row in batch.to_pylist():
                    yield _row_text(row, column, str(file))
    except _optional_library("pyarrow").ArrowException as error:
        raise UserError(f"{file} is not a readable Parquet file: {error}.") from error


def _row_text(row: dict[str, Any], column: str, where: str) -> str:
    """The text of a row; empty for null."""
    if column not in row:
        columns = ", ".join(row) or "none"
        raise UserError(f'{where} has no column "{column}": choose one of its columns with --column ({columns}).')
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise UserError(f'{where} has {text!r:.80} in the column "{column}", but it must be a string.')
    return text or ""


def _optional_library(name: str) -> Any:
    """A module of the extra `data`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"this kind of data needs {name.partition('.')[0]}: pip install -e '.[data]'.") from error
