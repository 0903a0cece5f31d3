"""Documents from files: text, JSON lines, Parquet."""

import glob
import gzip
import hashlib
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ldm_jax.data.split import cut
from ldm_jax.errors import UserError

BATCH_DOCUMENTS = 4096
BATCH_CHARACTERS = 4_000_000

Position = Any
"""Where to read on: a JSON value that only the source understands. None: at the start."""


class DocumentBatch(NamedTuple):
    """Some documents in a row. An empty text stands for a row without one."""

    texts: list[str]
    """Bytes that are no UTF-8 are in them as `surrogateescape` has them."""
    after: Position
    """Where the next document is."""


@runtime_checkable
class DocumentSource(Protocol):
    """Documents in an order that does not change."""

    fingerprint: str
    """Of what can be known without reading it all."""

    def batches(self, position: Position) -> Iterator[DocumentBatch]:
        """All documents from a position on. From any batch's `after` on, the batches are those that follow it."""
        ...

    def done(self, position: Position) -> float | None:
        """About which part of the source lies before a position; None where that is not known."""
        ...

    def sample(self) -> Iterator[str]:
        """The documents for a tokenizer to be trained on the first of; in an order that does not change."""
        ...


def in_batches(documents: Iterable[tuple[str, Position]]) -> Iterator[DocumentBatch]:
    """Documents, each with the position after it, as many at a time as are worth to be cut into tokens together."""
    texts, characters = [], 0
    after = None
    for text, after in documents:
        texts.append(text)
        characters += len(text)
        if len(texts) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield DocumentBatch(texts, after)
            texts, characters = [], 0
    if texts:
        yield DocumentBatch(texts, after)


class FileSource:
    """Documents of files, in the order of their names.

    A row of a `.jsonl` (`.json`, `.ndjson`) or `.parquet` file is a document; of any other file the whole content.
    `.gz` and `.zst` are unpacked.

    Args:
        patterns: paths or patterns such as `books/*.txt`; `**` goes into folders.
        column: where JSON lines and Parquet files have the text.
        document_bytes: text files are cut, after a line's end, into documents of about this size. None: they are whole.

    Raises:
        UserError: a pattern without a file.
    """

    def __init__(self, patterns: Sequence[str], column: str, document_bytes: int | None = None):
        found = set()
        for pattern in patterns:
            every = glob.glob(os.path.expanduser(pattern), recursive=True)
            files = {file for file in every if os.path.isfile(file)}
            if not files:
                raise UserError(f'there is no file "{pattern}": give files, or patterns such as "books/**/*.txt".')
            found |= files
        self._files = [Path(file) for file in sorted(found)]
        self._column, self._document_bytes = column, document_bytes
        stats = [file.stat() for file in self._files]
        self._sizes = [stat.st_size for stat in stats]
        stamps = (f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in zip(self._files, stats, strict=True))
        known = "\n".join(stamps)
        self.fingerprint = hashlib.blake2b(known.encode(errors="surrogateescape")).hexdigest()[:16]

    def batches(self, position: Position) -> Iterator[DocumentBatch]:
        """All documents from a position `[file, row]` on."""
        first, rows = position or (0, 0)

        def located() -> Iterator[tuple[str, Position]]:
            for number in range(first, len(self._files)):
                start = rows if number == first else 0
                for row, text in enumerate(islice(self._rows(self._files[number]), start, None), start):
                    yield text, [number, row + 1]

        return in_batches(located())

    def done(self, position: Position) -> float:
        """The part of all bytes that is in the files before the position's."""
        return sum(self._sizes[: position[0]]) / max(sum(self._sizes), 1)

    def sample(self) -> Iterator[str]:
        """The documents, the files in an order that has nothing to do with their names."""
        for file in sorted(self._files, key=lambda file: hashlib.blake2b(os.fsencode(file)).digest()):
            yield from self._rows(file)

    def _rows(self, file: Path) -> Iterator[str]:
        suffixes = [suffix for suffix in file.suffixes if suffix not in (".gz", ".zst")]
        kind = suffixes[-1] if suffixes else ""
        try:
            if kind == ".parquet":
                yield from _parquet_rows(file, self._column)
            elif kind in (".jsonl", ".json", ".ndjson"):
                with _unpacked(file) as lines:
                    for number, line in enumerate(lines, 1):
                        yield _json_row(line, f"line {number} of {file}", self._column)
            else:
                with _unpacked(file) as content:
                    text = content.read()
                parts = [text] if self._document_bytes is None else cut(text, self._document_bytes)
                yield from (part.decode(errors="surrogateescape") for part in parts)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} cannot be read: {error}.") from error


def _unpacked(file: Path) -> io.BufferedIOBase:
    match file.suffix:
        case ".gz":
            return gzip.open(file)
        case ".zst":  # Arrow, because zstandard's own reader takes the beginning of a frame for the whole
            return io.BufferedReader(optional_library("pyarrow").input_stream(str(file), compression="zstd"))
        case _:
            return file.open("rb")


def _json_row(line: bytes, where: str, column: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object, but every line must be one.")
    return text_of(row, column, where)


def _parquet_rows(file: Path, column: str) -> Iterator[str]:
    parquet = optional_library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            text_of(dict.fromkeys(table.schema_arrow.names), column, str(file))
            for batch in table.iter_batches(1024, columns=[column]):
                for row in batch.to_pylist():
                    yield text_of(row, column, str(file))
    except optional_library("pyarrow").ArrowException as error:
        raise UserError(f"{file} is no Parquet file that can be read: {error}.") from error


def text_of(row: dict[str, Any], column: str, where: str) -> str:
    """The text of a row, empty for null.

    Raises:
        UserError: the column is not there, or has something else.
    """
    if column not in row:
        there = ", ".join(row) or "none"
        raise UserError(f'{where} has no column "{column}": name one of its columns by --column ({there}).')
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise UserError(f'{where} has {text!r:.80} in the column "{column}", but it must be a text.')
    return text or ""


def optional_library(name: str) -> Any:
    """A module of the extra `data`. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"this kind of data needs {name.partition('.')[0]}: pip install -e '.[data]'.") from error
