"""Text as numbers and back: bytes, or whatever a `tokenizer.json` says."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int, UInt
from tokenizers import decoders, models, pre_tokenizers, trainers

from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

DESCRIPTION_FILE = "vocabulary.json"
TOKENIZER_FILE = "tokenizer.json"
BYTES = "bytes"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>")
"""Names under which tokenizers have the end of a document; the first that there is counts."""

Ids = UInt[np.ndarray, " _"]  # each its own length


@runtime_checkable
class Tokenizer(Protocol):
    """What text is cut into tokens with."""

    vocabulary: int
    """Tokens are less than this."""
    end_of_document: int
    """The token that follows every document; `encode` never gives it."""
    fingerprint: str
    """The same for two tokenizers that give the same tokens."""

    def encode(self, text: str) -> Ids:
        """The tokens of a text. Bytes that are no UTF-8 are given as `surrogateescape` has them."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of several texts, computed in parallel."""
        ...

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """The bytes that tokens stand for; those past the vocabulary stand for none."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer` reads. Raises OSError when a file cannot be written."""
        ...


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned type that holds every token."""
    return np.min_scalar_type(vocabulary - 1)


class ByteTokenizer:
    """A token is a byte; zero bytes end documents, so those in a text are left out."""

    vocabulary = 256
    end_of_document = 0
    fingerprint = BYTES

    def encode(self, text: str) -> Ids:
        """The text's bytes."""
        return np.frombuffer(text_bytes(text).replace(b"\0", b""), np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """The same bytes."""
        return bytes(token for token in np.asarray(ids).tolist() if token < self.vocabulary)

    def save(self, folder: Path) -> None:
        """Writes the description alone."""
        _write_description(folder, BYTES, self)


class JsonTokenizer:
    """The tokenizer of a `tokenizer.json`, of any kind that the `tokenizers` library knows.

    `decode` is exact for byte-level ones, even where a sequence ends inside a character. Special tokens that stand in a
    text are read as text.

    Args:
        text: the file's content.
        end_of_document: the name of that token. None: the first of `ENDS` that there is.
        name: the file, for error messages.

    Raises:
        UserError: the text is no tokenizer, or the token is not there.
    """

    def __init__(self, text: str, end_of_document: str | None = None, name: str = TOKENIZER_FILE):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library has no type of its own
            raise UserError(f"{name} is no tokenizer that the tokenizers library reads: {error}.") from error
        self._text = text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._added = {token: added.content for token, added in self._tokenizer.get_added_tokens_decoder().items()}
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end_of_document = self._find_end(end_of_document, name)
        self.fingerprint = hashlib.blake2b(f"{self.end_of_document} {text}".encode()).hexdigest()[:16]

    def _find_end(self, wanted: str | None, name: str) -> int:
        added = {content: token for token, content in self._added.items()}
        for candidate in ENDS if wanted is None else (wanted,):
            if candidate in added:
                return added[candidate]
        there = f"it has {', '.join(list(added)[:20])}" if added else "it has none"
        missing = "a token known to end documents" if wanted is None else f"the special token {wanted!r}"
        raise UserError(f"{name} has not {missing}: name one of its special tokens by --end-of-document ({there}).")

    def encode(self, text: str) -> Ids:
        """The tokens; bytes that are no UTF-8 are read as U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of several texts, on all cores."""
        found = self._tokenizer.encode_batch_fast([valid_text(text) for text in texts], add_special_tokens=False)
        every = [np.array(encoding.ids, token_dtype(self.vocabulary)) for encoding in found]
        # A token that is added but not special is found in texts all the same.
        return [ids[ids != self.end_of_document] if self.end_of_document in ids else ids for ids in every]

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """The bytes; of tokenizers that are not byte-level the text as the library decodes it."""
        tokens: list[int] = np.asarray(ids).tolist()
        if self._bytes is None:
            return self._tokenizer.decode(tokens, skip_special_tokens=False).encode()
        return b"".join(self._bytes.get(token, b"") for token in tokens)

    @cached_property
    def _bytes(self) -> dict[int, bytes] | None:
        """What each token stands for, of a byte-level tokenizer."""
        decoder = json.loads(self._text).get("decoder") or {}
        if "ByteLevel" not in [part.get("type") for part in [decoder, *decoder.get("decoders", [])]]:
            return None
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}

        def spelled(token: str) -> bytes:
            return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in token)

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = {token: content.encode() for token, content in self._added.items()}
        return {token: spelled(name) for name, token in vocabulary.items()} | added

    def save(self, folder: Path) -> None:
        """Copies the file as it was read, and writes the description."""
        write_atomically(folder / TOKENIZER_FILE, self._text)
        _write_description(folder, TOKENIZER_FILE, self, self._added[self.end_of_document])


def _write_description(folder: Path, kind: str, tokenizer: Tokenizer, end: str | None = None) -> None:
    description = {
        "tokenizer": kind,
        "vocabulary": tokenizer.vocabulary,
        "end_of_document": tokenizer.end_of_document,
        "end_of_document_token": end,
        "fingerprint": tokenizer.fingerprint,
    }
    write_atomically(folder / DESCRIPTION_FILE, json.dumps(description, indent=1) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that was saved in a folder.

    Raises:
        UserError: there is none, or its files are not as they were written.
    """
    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        kind, end = description["tokenizer"], description["end_of_document_token"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / DESCRIPTION_FILE} describes no tokenizer ({error}): restore the file.") from error
    tokenizer = ByteTokenizer() if kind == BYTES else read_tokenizer(folder / TOKENIZER_FILE, end)
    if tokenizer.fingerprint != description.get("fingerprint"):
        raise UserError(f"{folder / TOKENIZER_FILE} is not the file that was saved there: restore it.")
    return tokenizer


def read_tokenizer(file: Path, end_of_document: str | None = None) -> JsonTokenizer:
    """The tokenizer of a `tokenizer.json` anywhere.

    Raises:
        UserError: as `JsonTokenizer`, or the file cannot be read.
    """
    try:
        text = file.read_bytes().decode()  # as it is: reading as text would change the ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the tokenizer {file} cannot be read: {error}.") from error
    return JsonTokenizer(text, end_of_document, str(file))


def train_bpe(texts: Iterable[str], vocabulary: int) -> JsonTokenizer:
    """A byte-level BPE with at most `vocabulary` tokens, `<|endoftext|>` among them. The same texts give the same one.

    Raises:
        UserError: the vocabulary has no room for the 256 bytes and the end of a document.
    """
    if vocabulary < 257:
        raise UserError(f"vocabulary is {vocabulary}, but a BPE has 256 bytes and an end of document: at least 257.")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[ENDS[0]], initial_alphabet=_byte_characters(), show_progress=False
    )
    valid: Iterator[str] = (valid_text(text) for text in texts)
    tokenizer.train_from_iterator(valid, trainer)
    return JsonTokenizer(tokenizer.to_str())


def text_bytes(text: str) -> bytes:
    """The bytes of a text; those that are no UTF-8 come back as they were read by `surrogateescape`."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return text.encode(errors="surrogatepass")


def valid_text(text: str) -> str:
    """The text with U+FFFD for bytes that are no UTF-8."""
    return text_bytes(text).decode(errors="replace")


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level tokenizer: itself where it is seen on paper."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
