"""A corpus: documents of bytes, split into training and validation by a hash of their content."""

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
from ldm_jax.data.split import content_hash, cut, is_validation
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import UserError

END_OF_DOCUMENT = ByteTokenizer.end_of_document


class ByteCorpus(NamedTuple):
    """Both parts of a corpus, one byte a token: documents one after the other, each followed by a zero byte."""

    train: UInt8[np.ndarray, " train_tokens"]
    validation: UInt8[np.ndarray, " validation_tokens"]
    fingerprint: str
    """A hash of both parts."""


def load_corpus(config: DataConfig) -> ByteCorpus:
    """Reads the corpus and splits it. The same files give the same arrays, whatever their names or their folder.

    Raises:
        UserError: no file, nothing in the files, a file that cannot be read, too few documents to split, or a part
            that is shorter than one context.
    """
    files = corpus_files(config)
    documents = [document for file in files for document in _documents(file, config.document_bytes)]
    # Sorted by content: neither the names of files nor the order of a folder changes what is trained on.
    documents = sorted({content_hash(document): document for document in documents}.items())
    if len(documents) < 2:
        count = "1 document" if documents else "0 documents"
        raise UserError(
            f"the corpus {_name(config)} has {count}, but one for training and one for validation are needed: add "
            "text, or cut files into shorter documents with data.document_bytes."
        )
    held_out = max(1, sum(is_validation(digest, config.validation_fraction) for digest, _ in documents))
    held_out = min(held_out, len(documents) - 1)
    validation, train = (
        _join([document for _, document in part]) for part in (documents[:held_out], documents[held_out:])
    )
    for part, tokens in (("training", train), ("validation", validation)):
        if len(tokens) <= config.context:
            raise UserError(
                f"the {part} part of the corpus {_name(config)} has {len(tokens)} bytes, but one window needs "
                f"{config.context + 1}: add text, or lower data.context."
            )
    return ByteCorpus(train, validation, hashlib.blake2b(train.tobytes() + validation.tobytes()).hexdigest()[:16])


def corpus_files(config: DataConfig) -> list[Path]:
    """The files of the corpus, sorted by path.

    Raises:
        UserError: there are none, or the path is that of a folder.
    """
    if config.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        installed = {"site-packages", "dist-packages"}
        files = [file for file in root.rglob("*.py") if not installed.intersection(file.relative_to(root).parts)]
    else:
        pattern = os.path.expanduser(config.path)
        if os.path.isdir(pattern):
            raise UserError(f'data.path is "{config.path}", a folder: say which files, as in "{config.path}/**/*.txt".')
        files = [Path(file) for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)]
    if not files:
        raise UserError(f"the corpus {_name(config)} has no file: check data.path.")
    return sorted(files)


def _name(config: DataConfig) -> str:
    return Corpus.STDLIB.value if config.path is None else f'"{config.path}"'


def _documents(file: Path, size: int) -> Iterator[bytes]:
    """The file without zero bytes, in documents of about `size` bytes."""
    try:
        return cut(file.read_bytes().replace(bytes([END_OF_DOCUMENT]), b""), size)
    except OSError as error:
        raise UserError(f"the corpus file {file} cannot be read: {error.strerror}.") from error


def _join(documents: list[bytes]) -> UInt8[np.ndarray, " tokens"]:
    end = bytes([END_OF_DOCUMENT])
    return np.frombuffer(b"".join(document + end for document in documents), np.uint8)
