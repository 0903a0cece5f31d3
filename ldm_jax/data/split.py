"""How text becomes documents, and which of them are held out."""

import hashlib
from collections.abc import Iterator

RULE = "held out: documents whose BLAKE2b hash of 8 bytes, as a number, is below fraction * 2^64"


def cut(text: bytes, size: int) -> Iterator[bytes]:
    """The text, cut after the first end of a line past every `size` bytes."""
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", start + size - 1, start + 2 * size)
        end = line_end + 1 if line_end >= 0 else start + size  # a line that does not end is cut where it stands
        yield text[start:end]
        start = end


def content_hash(document: bytes) -> bytes:
    """Eight bytes that depend on the content alone."""
    return hashlib.blake2b(document, digest_size=8).digest()


def is_validation(digest: bytes, fraction: float) -> bool:
    """Whether a document with this hash is held out: a document and its copies are on one side."""
    return int.from_bytes(digest) < fraction * 2**64
