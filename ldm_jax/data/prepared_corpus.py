"""A prepared corpus: its files, and its tokens read from them on demand.

    corpus.json                     the manifest, with sizes and checksums of all shards and its own; written last
    progress.json                   the state of an unfinished preparation
    vocabulary.json, tokenizer.json the tokenizer
    train-00000.tokens.npy          tokens of whole documents, each followed by the end-of-document token
    train-00000.ends.npy            for each document of the shard, the position after its end-of-document token
    validation-00000.tokens.npy     the same for held-out documents, from the same section of the source
    validation-00000.ends.npy

A shard without documents of a part has no files of that part.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt

from ldm_jax.data.documents import Position
from ldm_jax.data.tokenizer import Tokenizer, load_tokenizer
from ldm_jax.errors import UserError
from ldm_jax.files import replacing, write_atomically

MANIFEST_FILE = "corpus.json"
PROGRESS_FILE = "progress.json"
FORMAT = 1
PARTS = ("train", "validation")


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    name: str
    bytes: int
    checksum: str
    """BLAKE2b, 16 bytes, hexadecimal."""


@dataclass(frozen=True)
class ShardRecord:
    """One shard of one part."""

    documents: int
    tokens: int
    """Includes the end-of-document tokens."""
    text_bytes: int
    """Bytes of the documents as UTF-8."""
    files: tuple[FileRecord, FileRecord]
    """Tokens and ends."""

    @staticmethod
    def from_json(table: Mapping[str, Any]) -> "ShardRecord":
        """The inverse of `asdict`."""
        tokens, ends = (FileRecord(**file) for file in table["files"])
        return ShardRecord(table["documents"], table["tokens"], table["text_bytes"], (tokens, ends))


@dataclass(frozen=True)
class PreparationProgress:
    """The content of `progress.json`: the complete shards of an unfinished preparation, and where to resume."""

    options: Mapping[str, Any]
    source: str
    """Fingerprint of the source."""
    position: Position = None
    shards: int = 0
    empty_documents: int = 0
    documents_not_utf8: int = 0
    train: tuple[ShardRecord, ...] = ()
    validation: tuple[ShardRecord, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in the complete shards."""
        return sum(shard.tokens for shard in (*self.train, *self.validation))


@dataclass(frozen=True)
class Manifest:
    """The content of `corpus.json`."""

    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocabulary: int
    end_of_document: int
    dtype: str
    split_rule: str
    validation_fraction: float
    options: dict[str, Any]
    """The `PrepareOptions`."""
    empty_documents: int
    """Number of empty documents, which were skipped."""
    documents_not_utf8: int
    train: tuple[ShardRecord, ...]
    validation: tuple[ShardRecord, ...]

    def shards(self, part: str) -> tuple[ShardRecord, ...]:
        """The shards of a part."""
        return getattr(self, part)

    def count(self, part: str, what: str) -> int:
        """The sum of `documents`, `tokens` or `text_bytes` over the shards of a part."""
        return sum(getattr(shard, what) for shard in self.shards(part))

    def write(self, directory: Path) -> None:
        """Writes `corpus.json`. Raises OSError."""
        parts = {
            part: {name: self.count(part, name) for name in ("documents", "tokens", "text_bytes")}
            | {"shards": [asdict(shard) for shard in self.shards(part)]}
            for part in PARTS
        }
        table = {"format": FORMAT} | asdict(self) | parts
        table["checksum"] = _table_checksum(table)
        write_atomically(directory / MANIFEST_FILE, json.dumps(table, indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Reads `corpus.json`. Raises UserError if the file is missing, damaged or has another format."""
    file = directory / MANIFEST_FILE
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        checksum = table.pop("checksum", None)  # corpora of earlier versions have none
        if (version := table["format"]) != FORMAT:
            raise UserError(f"{file} has format {version}, but only {FORMAT} can be read: prepare the corpus again.")
        if checksum not in (None, _table_checksum(table)):
            raise ValueError("its checksum differs")
        del table["format"]
        table |= {part: tuple(map(ShardRecord.from_json, table[part]["shards"])) for part in PARTS}
        return Manifest(**table)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{directory} holds no prepared corpus: give a directory that scripts/prepare_data.py has finished, or "
            "set data.path for files of text."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}): restore it, or prepare the corpus again.") from error


def _table_checksum(table: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16).hexdigest()


class TokenizedDocument(NamedTuple):
    """A document, without the end-of-document token."""

    tokens: UInt[np.ndarray, " _"]
    text_bytes: int
    """Length of its text."""


def write_shard(
    directory: Path, name: str, documents: Sequence[TokenizedDocument], end_of_document: int, dtype: np.dtype
) -> ShardRecord:
    """Writes documents as `NAME.tokens.npy` and `NAME.ends.npy`. Raises OSError."""
    ends = np.cumsum([len(document.tokens) + 1 for document in documents], dtype=np.uint64)
    tokens = np.full(int(ends[-1]), end_of_document, dtype)
    for document, end in zip(documents, ends.tolist(), strict=True):
        tokens[end - 1 - len(document.tokens) : end - 1] = document.tokens
    files = _write_array(directory / f"{name}.tokens.npy", tokens), _write_array(directory / f"{name}.ends.npy", ends)
    return ShardRecord(len(documents), len(tokens), sum(document.text_bytes for document in documents), files)


def _write_array(path: Path, array: np.ndarray) -> FileRecord:
    with replacing(path) as file:
        np.save(file, array)
    return FileRecord(path.name, path.stat().st_size, _checksum(path))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def check_shards(directory: Path, shards: Sequence[ShardRecord], checksums: bool = False) -> None:
    """Compares sizes of shards' files, and optionally checksums. Raises UserError if one is not as it was written."""

    def problem(record: FileRecord) -> str | None:
        try:
            size = (directory / record.name).stat().st_size
            if size != record.bytes:
                return f"has {size:,} bytes, but {record.bytes:,} were written"
            if checksums and _checksum(directory / record.name) != record.checksum:
                return "is damaged (its checksum differs)"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None

    records = [file for shard in shards for file in shard.files]
    with ThreadPoolExecutor() as pool:
        for record, message in zip(records, pool.map(problem, records), strict=True):
            if message is not None:
                raise UserError(
                    f"the shard {directory / record.name} {message}: restore it, or prepare the corpus again in "
                    "another directory."
                )


class TokenStream:
    """The concatenated documents of a part, each followed by the end-of-document token."""

    def __init__(self, directory: Path, manifest: Manifest, part: str):
        shards = manifest.shards(part)
        self._shards = [_open_array(directory / shard.files[0].name) for shard in shards]
        self._end_files = [directory / shard.files[1].name for shard in shards]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._documents = [0, *accumulate(shard.documents for shard in shards)]
        self._empty = np.zeros(0, manifest.dtype)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, tokens: slice) -> UInt[np.ndarray, " tokens"]:
        """The tokens of a slice with step 1."""
        start, stop, _ = tokens.indices(len(self))
        shard = bisect_right(self._starts, start) - 1
        pieces = []
        while start < stop:
            begin, end = self._starts[shard : shard + 2]
            pieces.append(self._shards[shard][start - begin : stop - begin])
            start, shard = end, shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([self._empty, *pieces])

    @property
    def documents(self) -> int:
        """The number of documents."""
        return self._documents[-1]

    def document(self, index: int) -> UInt[np.ndarray, " tokens"]:
        """The tokens of a document, without the end-of-document token. Raises IndexError."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} is out of range: there are {self.documents}.")
        shard = bisect_right(self._documents, index) - 1
        row = index - self._documents[shard]
        ends = _open_array(self._end_files[shard])
        start = int(ends[row - 1]) if row else 0
        return self._shards[shard][start : int(ends[row]) - 1]


def _open_array(file: Path) -> np.ndarray:
    """Maps an array into memory; as a plain array, because slicing a `memmap` is slow."""
    try:
        return np.asarray(np.load(file, mmap_mode="r"))
    except OSError as error:
        raise UserError(
            f"{file} cannot be opened: {error.strerror}. A corpus needs one open file per shard: raise the limit "
            "(ulimit -n), or prepare the corpus with a larger --shard-tokens."
        ) from error


class PreparedCorpus(NamedTuple):
    """Both parts of a corpus that `scripts/prepare_data.py` has written; one of them may be empty."""

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer
    bytes_per_token: float
    """Bytes of text per token of the validation part; the end-of-document tokens are not counted."""
    validation_fraction: float
    """The fraction of the documents that was to be held out."""
    fingerprint: str
    """A hash of `corpus.json`, which has the checksums of all shards."""


def load_prepared(directory: Path, verify: bool = True) -> PreparedCorpus:
    """Opens a corpus; `verify` reads every file to compare its checksum. Raises UserError if one is not as written."""
    manifest = read_manifest(directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer.fingerprint != manifest.tokenizer:
        raise UserError(f"the tokenizer in {directory} is not the one that the corpus was made with: restore it.")
    check_shards(directory, manifest.train + manifest.validation, verify)
    text_tokens = manifest.count("validation", "tokens") - manifest.count("validation", "documents")
    return PreparedCorpus(
        TokenStream(directory, manifest, "train"),
        TokenStream(directory, manifest, "validation"),
        tokenizer,
        manifest.count("validation", "text_bytes") / max(text_tokens, 1),
        manifest.validation_fraction,
        hashlib.blake2b((directory / MANIFEST_FILE).read_bytes()).hexdigest()[:16],
    )
