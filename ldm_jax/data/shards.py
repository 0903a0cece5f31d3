"""The files of a prepared corpus: shards of tokens, and what describes them.

    corpus.json                     what there is, with sizes and checksums; it is written last
    vocabulary.json, tokenizer.json the tokenizer
    train-00000.tokens.npy          tokens of whole documents, each followed by the end-of-document token
    train-00000.ends.npy            where in the shard each document ends, past that token
    validation-00000.tokens.npy     the same of the documents held out, from the same stretch of the source

A shard without documents of a part has no files of that part.
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from ldm_jax.errors import UserError
from ldm_jax.files import replacing, write_atomically

MANIFEST_FILE = "corpus.json"
FORMAT = 1
PARTS = ("train", "validation")


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    name: str
    bytes: int
    checksum: str
    """BLAKE2b, 16 bytes."""


@dataclass(frozen=True)
class ShardRecord:
    """One shard of one part."""

    documents: int
    tokens: int
    """With the end of each document."""
    text_bytes: int
    """Of the documents, as UTF-8."""
    files: tuple[FileRecord, FileRecord]
    """Tokens and ends."""


@dataclass(frozen=True)
class Manifest:
    """What `corpus.json` says."""

    tokenizer: str
    """Its fingerprint."""
    vocabulary: int
    end_of_document: int
    dtype: str
    split_rule: str
    validation_fraction: float
    options: dict[str, Any]
    """What it was prepared with."""
    empty_documents: int
    """Left out."""
    documents_not_utf8: int
    train: tuple[ShardRecord, ...]
    validation: tuple[ShardRecord, ...]

    def shards(self, part: str) -> tuple[ShardRecord, ...]:
        """Those of a part."""
        return getattr(self, part)

    def count(self, part: str, what: str) -> int:
        """The sum over a part's shards of `documents`, `tokens` or `text_bytes`."""
        return sum(getattr(shard, what) for shard in self.shards(part))

    def write(self, folder: Path) -> None:
        """Writes `corpus.json`. Raises OSError."""
        parts = {
            part: {name: self.count(part, name) for name in ("documents", "tokens", "text_bytes")}
            | {"shards": [asdict(shard) for shard in self.shards(part)]}
            for part in PARTS
        }
        write_atomically(folder / MANIFEST_FILE, json.dumps({"format": FORMAT} | asdict(self) | parts, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The description of a prepared corpus.

    Raises:
        UserError: the folder has none, or one that is cut off or of another format.
    """
    file = folder / MANIFEST_FILE
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if table.pop("format") != FORMAT:
            raise UserError(f"{file} is of another format than {FORMAT}: prepare the corpus again.")
        table |= {part: tuple(map(shard_record, table[part]["shards"])) for part in PARTS}
        return Manifest(**table)
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no prepared corpus: give a folder that scripts/prepare_data.py has finished."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}): restore it, or prepare the corpus again.") from error


def shard_record(table: dict[str, Any]) -> ShardRecord:
    """The record that `asdict` has made a table of."""
    tokens, ends = (FileRecord(**file) for file in table["files"])
    return ShardRecord(table["documents"], table["tokens"], table["text_bytes"], (tokens, ends))


def write_shard(
    folder: Path,
    name: str,
    documents: Sequence[UInt[np.ndarray, " _"]],
    end_of_document: int,
    dtype: np.dtype,
    text_bytes: int,
) -> ShardRecord:
    """Writes documents, each with its end, as `NAME.tokens.npy` and `NAME.ends.npy`. Raises OSError."""
    ends = np.cumsum([len(document) + 1 for document in documents], dtype=np.uint64)
    tokens = np.full(int(ends[-1]), end_of_document, dtype)
    for document, end in zip(documents, ends.tolist(), strict=True):
        tokens[end - 1 - len(document) : end - 1] = document
    files = _write_array(folder / f"{name}.tokens.npy", tokens), _write_array(folder / f"{name}.ends.npy", ends)
    return ShardRecord(len(documents), len(tokens), text_bytes, files)


def _write_array(path: Path, array: np.ndarray) -> FileRecord:
    with replacing(path) as file:
        np.save(file, array)
    return FileRecord(path.name, path.stat().st_size, _checksum(path))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def check_files(folder: Path, records: Sequence[FileRecord], checksums: bool = False) -> None:
    """Raises UserError naming the first file that is missing or not as it was written."""

    def fault(record: FileRecord) -> str | None:
        try:
            size = (folder / record.name).stat().st_size
            if size != record.bytes:
                return f"has {size:,} bytes, but {record.bytes:,} were written"
            if checksums and _checksum(folder / record.name) != record.checksum:
                return "has other content than was written (its checksum differs)"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None

    with ThreadPoolExecutor() as pool:
        for record, found in zip(records, pool.map(fault, records), strict=True):
            if found is not None:
                raise UserError(
                    f"the shard {folder / record.name} {found}: restore it, or prepare the corpus again in another "
                    "folder."
                )
