"""A corpus of files read as bytes: one byte is one token."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from ldm_jax.config import Corpus, DataConfig
from ldm_jax.data.documents import content_hash, cut, is_near, is_validation, matching_files
from ldm_jax.data.tokenizer import ZERO_BYTES, ByteTokenizer
from ldm_jax.errors import UserError

END_OF_DOCUMENT = bytes([ByteTokenizer.end_of_document])
SMALLEST_CUT = 1024
"""Small corpora are cut into documents of at least this many bytes, or `data.document_bytes` if that is less."""

Documents = list[tuple[bytes, bytes]]
"""Hashes and contents of different documents, sorted by hash."""


class ByteCorpus(NamedTuple):
    """Both parts of a corpus: concatenated documents, each followed by a zero byte."""

    train: UInt8[np.ndarray, " train_tokens"]
    validation: UInt8[np.ndarray, " validation_tokens"]
    fingerprint: str
    """A hash of both parts."""


def load_byte_corpus(config: DataConfig) -> ByteCorpus:
    """Reads the files of a corpus and splits their documents into training and validation.

    The result depends only on the content of the files, not on their names or directory.

    Raises:
        UserError: there is no file, a file cannot be read or has zero bytes, or there are too few documents to split.
    """
    validation, train = map(_concatenated, _split(corpus_files(config), config))
    return ByteCorpus(train, validation, hashlib.blake2b(train.tobytes() + validation.tobytes()).hexdigest()[:16])


def load_bytes(files: Sequence[Path], document_bytes: int) -> UInt8[np.ndarray, " tokens"]:
    """The documents of files, as one part of a byte corpus. Raises UserError if a file cannot be used."""
    return _concatenated(_documents(files, document_bytes))


def corpus_files(config: DataConfig) -> list[Path]:
    """The files of a corpus, sorted by path. Raises UserError if there is no file, or the path is a directory."""
    if config.path is not None:
        return matching_files(config.path)
    files = []
    for directory, subdirectories, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subdirectories[:] = [name for name in subdirectories if name not in ("site-packages", "dist-packages")]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _split(files: Sequence[Path], config: DataConfig) -> tuple[Documents, Documents]:
    """The validation and the training documents; files are cut finer until the held-out share is as wanted."""
    fraction, size = config.validation_fraction, config.document_bytes
    while True:
        documents = _documents(files, size)
        count, share = _held_out(documents, fraction)
        if is_near(share, fraction) or size < 2 * SMALLEST_CUT:
            break
        size //= 2
    if not count:
        raise UserError(
            f"the corpus {corpus_name(config)} has too little text to be split into training and validation: add text, "
            "set data.validation_path to other text, or cut files into shorter documents with data.document_bytes."
        )
    return documents[:count], documents[count:]


def _held_out(documents: Documents, fraction: float) -> tuple[int, float]:
    """How many documents are held out, in the order of their hashes, and the share of the text that they are.

    Their hashes decide. Where the share would not be near `fraction`, it is as many as come nearest to it.
    """
    ends = list(accumulate(len(document) for _, document in documents))
    shares = [end / ends[-1] for end in ends[:-1]]
    if not shares:
        return 0, 0.0
    count = sum(is_validation(digest, fraction) for digest, _ in documents)
    if not 0 < count < len(documents) or not is_near(shares[count - 1], fraction):
        count = 1 + min(range(len(shares)), key=lambda index: abs(shares[index] - fraction))
    return count, shares[count - 1]


def corpus_name(config: DataConfig) -> str:
    """How messages name the corpus."""
    return Corpus.STDLIB.value if config.path is None else f'"{config.path}"'


def _documents(files: Sequence[Path], size: int) -> Documents:
    """The documents of files; as they are sorted by hash, file names do not change the training data."""
    documents: dict[bytes, bytes] = {}
    zeros: dict[Path, int] = {}
    for file in files:
        text = _read(file)
        if count := text.count(END_OF_DOCUMENT):
            zeros[file] = count
        documents |= {content_hash(document): document for document in cut(text, size)}
    if zeros:
        raise UserError(
            f"{next(iter(zeros))} has zero bytes (number in all files: {sum(zeros.values()):,}; files that have some: "
            f"{len(zeros):,} of {len(files):,}), {ZERO_BYTES}"
        )
    return sorted(documents.items())


def _concatenated(documents: Documents) -> UInt8[np.ndarray, " tokens"]:
    return np.frombuffer(b"".join(document + END_OF_DOCUMENT for _, document in documents), np.uint8)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"the corpus file {file} cannot be read: {error.strerror}.") from error
