"""A prepared corpus: its tokens as one stream for each part, read from disk where they are asked for."""

import hashlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt

from ldm_jax.data.shards import MANIFEST_FILE, PARTS, Manifest, check_files, read_manifest
from ldm_jax.data.tokenizer import Tokenizer, load_tokenizer
from ldm_jax.errors import UserError


class TokenStream:
    """The documents of a part one after the other, each followed by the end-of-document token."""

    def __init__(self, folder: Path, manifest: Manifest, part: str):
        shards = manifest.shards(part)
        self._shards = [_mapped(folder / shard.files[0].name) for shard in shards]
        self._end_files = [folder / shard.files[1].name for shard in shards]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._documents = [0, *accumulate(shard.documents for shard in shards)]
        self._empty = np.zeros(0, manifest.dtype)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, tokens: slice) -> UInt[np.ndarray, " tokens"]:
        """The tokens from a slice's start to its stop, which lie in the stream."""
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
        """How many there are."""
        return self._documents[-1]

    def document(self, index: int) -> UInt[np.ndarray, " tokens"]:
        """The tokens of a document, without its end. Raises IndexError."""
        if not 0 <= index < self.documents:
            raise IndexError(f"there is no document {index} of {self.documents}.")
        shard = bisect_right(self._documents, index) - 1
        row = index - self._documents[shard]
        ends = _mapped(self._end_files[shard])
        start = int(ends[row - 1]) if row else 0
        return self._shards[shard][start : int(ends[row]) - 1]


def _mapped(file: Path) -> np.ndarray:
    """The array in a file, read where it is asked for; not as a `memmap`, which is slow to slice."""
    try:
        return np.asarray(np.load(file, mmap_mode="r"))
    except OSError as error:
        raise UserError(
            f"{file} cannot be opened: {error.strerror}. A corpus needs an open file a shard: raise the limit "
            "(ulimit -n), or prepare it with more --shard-tokens."
        ) from error


class PreparedCorpus(NamedTuple):
    """Both parts of a corpus that `scripts/prepare_data.py` has written."""

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer
    bytes_per_token: float
    """Of the validation part: bytes of its text by its tokens, the ends of documents among them."""
    fingerprint: str
    """A hash of all that the folder holds."""


def load_prepared(folder: Path, verify: bool = True) -> PreparedCorpus:
    """Opens a corpus. With `verify` every file is read once and its checksum compared.

    Raises:
        UserError: no corpus, a file that is not as it was written, or a part without text.
    """
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != manifest.tokenizer:
        raise UserError(f"the tokenizer in {folder} is not the one that the corpus was made with: restore it.")
    records = [file for part in PARTS for shard in manifest.shards(part) for file in shard.files]
    check_files(folder, records, verify)
    for part in PARTS:
        if not manifest.shards(part):
            raise UserError(
                f"the corpus {folder} has no document in its {part} part: prepare more text in another folder, cut "
                "files by --document-bytes, or change --validation-fraction."
            )
    return PreparedCorpus(
        TokenStream(folder, manifest, "train"),
        TokenStream(folder, manifest, "validation"),
        tokenizer,
        manifest.count("validation", "text_bytes") / manifest.count("validation", "tokens"),
        hashlib.blake2b((folder / MANIFEST_FILE).read_bytes()).hexdigest()[:16],
    )
