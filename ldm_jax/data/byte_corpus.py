"""A corpus of files read as bytes: one byte is one token."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from ldm_jax.config import Corpus, DataConfig
from ldm_jax.data.documents import content_hash, cut, is_validation
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import UserError

END_OF_DOCUMENT = bytes([ByteTokenizer.end_of_document])


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
        UserError: there is no file, a file cannot be read, there are too few documents to split, or a part is shorter
            than one window.
    """
    documents = [document for file in corpus_files(config) for document in _documents(file, config.document_bytes)]
    # Sorted by hash, so that file names do not change the training data.
    documents = sorted({content_hash(document): document for document in documents}.items())
    if len(documents) < 2:
        raise UserError(
            f"the corpus {_name(config)} has {len(documents)} document(s), but at least 2 are needed, one for training "
            "and one for validation: add text, or cut files into shorter documents with data.document_bytes."
        )
    count = sum(is_validation(digest, config.validation_fraction) for digest, _ in documents)
    count = min(max(count, 1), len(documents) - 1)  # the hashes below the threshold come first
    validation, train = (
        np.frombuffer(b"".join(document + END_OF_DOCUMENT for _, document in part), np.uint8)
        for part in (documents[:count], documents[count:])
    )
    for part, tokens in (("training", train), ("validation", validation)):
        if len(tokens) <= config.context:
            raise UserError(
                f"the {part} part of the corpus {_name(config)} has {len(tokens)} bytes, but one window needs "
                f"{config.context + 1}: add text, or lower data.context."
            )
    return ByteCorpus(train, validation, hashlib.blake2b(train.tobytes() + validation.tobytes()).hexdigest()[:16])


def corpus_files(config: DataConfig) -> list[Path]:
    """The files of a corpus, sorted by path.

    Raises:
        UserError: there is no file, or the path is a directory.
    """
    if config.path is None:
        files = []
        for directory, subdirectories, names in os.walk(sysconfig.get_paths()["stdlib"]):
            subdirectories[:] = [name for name in subdirectories if name not in ("site-packages", "dist-packages")]
            files += [Path(directory, name) for name in names if name.endswith(".py")]
    else:
        pattern = os.path.expanduser(config.path)
        if os.path.isdir(pattern):
            raise UserError(
                f'data.path is "{config.path}", a directory: give a pattern of files, such as "{config.path}/**/*.txt".'
            )
        files = [Path(file) for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)]
    if not files:
        raise UserError(f"the corpus {_name(config)} has no file: check data.path.")
    return sorted(files)


def _name(config: DataConfig) -> str:
    return Corpus.STDLIB.value if config.path is None else f'"{config.path}"'


def _documents(file: Path, size: int) -> Iterator[bytes]:
    try:
        return cut(file.read_bytes().replace(END_OF_DOCUMENT, b""), size)
    except OSError as error:
        raise UserError(f"the corpus file {file} cannot be read: {error.strerror}.") from error
