"""Tokenizers: bytes, any `tokenizer.json`, or none."""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Usual names of the end-of-document token; a tokenizer's first one in this order is used."""

ZERO_BYTES = (
    "but a zero byte is the token that ends a document. If it is UTF-16, convert it to UTF-8; if it is not text, leave "
    "it out; to keep zero bytes, prepare a corpus with --tokenizer bpe."
)
"""What error messages say of zero bytes."""

MOST_GAPS = 1024
"""Ids without a token that any `tokenizer.json` may have; beyond that, at most as many as tokens."""

Ids = UInt[np.ndarray, " _"]  # of any length


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    vocabulary: int
    """Every token is less than this."""
    ids: Int[np.ndarray, " tokens"]
    """The ids that have a token, ascending."""
    end_of_document: int
    """The token that follows every document; `encode` never returns it."""
    fingerprint: str
    """Equal for tokenizers that give the same tokens."""

    @property
    def start(self) -> tuple[int, ...]:
        """Tokens that the tokenizer's own rules put before a text, such as Llama's `<s>`; `encode` does not."""
        ...

    def encode(self, text: str) -> Ids:
        """The tokens of a text; bytes that are not valid UTF-8 are represented as by `surrogateescape`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of several texts, computed in parallel."""
        ...

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """The bytes of tokens; tokens outside the vocabulary have none."""
        ...

    def save(self, directory: Path) -> None:
        """Writes the files that `load_tokenizer` reads. Raises OSError."""
        ...


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer type for the tokens of a vocabulary."""
    return np.min_scalar_type(vocabulary - 1)


class ByteTokenizer:
    """One byte is one token. A zero byte ends a document, so a text must have none."""

    vocabulary = 256
    ids = np.arange(256)
    end_of_document = 0
    start = ()
    fingerprint = BYTES

    def encode(self, text: str) -> Ids:
        """The bytes of the text. Raises UserError if one of them is zero."""
        content = text_bytes(text)
        if zeros := content.count(0):
            raise UserError(f"the document {text[:40]!r}... has zero bytes ({zeros:,}), {ZERO_BYTES}")
        return np.frombuffer(content, np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """The same bytes."""
        return bytes(token for token in np.asarray(ids).tolist() if token < self.vocabulary)

    def save(self, directory: Path) -> None:
        """Writes `vocabulary.json`."""
        _write_description(directory, BYTES, self)


class JsonTokenizer:
    """The tokenizer of a `tokenizer.json`, of any kind that the `tokenizers` library supports.

    `decode` is exact for byte-level tokenizers, even where a sequence ends inside a character. The names of special
    tokens in a text are encoded as ordinary text.

    Args:
        text: the content of the file.
        end_of_document: name of the end-of-document token. None: the tokenizer's first one in `ENDS`.
        name: name of the file, for error messages.

    Raises:
        UserError: the text is not a tokenizer, or it has no such token.
    """

    def __init__(self, text: str, end_of_document: str | None = None, name: str = TOKENIZER_FILE):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises this type
            raise UserError(f"{name} is not a tokenizer of the tokenizers library: {error}.") from error
        self._text = text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._added = {token: added.content for token, added in self._tokenizer.get_added_tokens_decoder().items()}
        self.ids = np.array(sorted(set(self._tokenizer.get_vocab(with_added_tokens=True).values())), np.int64)
        self.vocabulary = 1 + int(max(self.ids, default=-1))
        if self.vocabulary > 2 * len(self.ids) + MOST_GAPS:
            raise UserError(
                f"{name} has {len(self.ids):,} tokens, but the largest id is {self.vocabulary - 1:,}, and a model has "
                "parameters for every id up to that: number its tokens without gaps."
            )
        self.end_of_document = self._find_end(end_of_document, name)
        self.fingerprint = hashlib.blake2b(f"{self.end_of_document} {text}".encode()).hexdigest()[:16]

    def _find_end(self, wanted: str | None, name: str) -> int:
        added = {content: token for token, content in self._added.items()}
        for candidate in ENDS if wanted is None else (wanted,):
            if candidate in added:
                return added[candidate]
        names = ", ".join(list(added)[:20]) or "none"
        missing = "special token with a usual end-of-document name" if wanted is None else f"special token {wanted!r}"
        raise UserError(f"{name} has no {missing}: choose one of its special tokens with --end-of-document ({names}).")

    @property
    def start(self) -> tuple[int, ...]:
        """The special tokens that the file's post-processor puts before a text."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        special = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(token for token, _ in itertools.takewhile(lambda each: each[1], special))

    def encode(self, text: str) -> Ids:
        """The tokens; bytes that are not valid UTF-8 are encoded as U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of several texts, on all cores."""
        encodings = self._tokenizer.encode_batch_fast([valid_text(text) for text in texts], add_special_tokens=False)
        tokens = [np.array(encoding.ids, token_dtype(self.vocabulary)) for encoding in encodings]
        # An added token that is not marked as special is encoded in texts, too.
        return [ids[ids != self.end_of_document] if self.end_of_document in ids else ids for ids in tokens]

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """The bytes. For a tokenizer that is not byte-level, the text as decoded by the library."""
        tokens: list[int] = np.asarray(ids).tolist()
        if self._bytes is None:
            return self._tokenizer.decode(tokens, skip_special_tokens=False).encode()
        return b"".join(self._bytes.get(token, b"") for token in tokens)

    @cached_property
    def _bytes(self) -> dict[int, bytes] | None:
        """The bytes of each token; None for a tokenizer that is not byte-level."""
        decoder = json.loads(self._text).get("decoder") or {}
        if "ByteLevel" not in [part.get("type") for part in [decoder, *decoder.get("decoders", [])]]:
            return None
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}

        def token_bytes(name: str) -> bytes:
            return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in name)

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = {token: content.encode() for token, content in self._added.items()}
        return {token: token_bytes(name) for name, token in vocabulary.items()} | added

    def save(self, directory: Path) -> None:
        """Writes `vocabulary.json` and an exact copy of the `tokenizer.json`."""
        write_atomically(directory / TOKENIZER_FILE, self._text)
        _write_description(directory, TOKENIZER_FILE, self, self._added[self.end_of_document])


class MissingTokenizer:
    """Stands for the tokenizer of a model that was imported without one. It cannot convert text."""

    fingerprint = "none"
    end_of_document = -1
    start = ()

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.ids = np.arange(vocabulary)

    def encode(self, text: str) -> Ids:
        """Raises UserError."""
        raise UserError(
            "the model was imported without a tokenizer, so it takes no text: import it again with --tokenizer "
            "TOKENIZER.json."
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Raises UserError."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Int[np.ndarray, " _"] | Ids | Sequence[int]) -> bytes:
        """No bytes."""
        return b""

    def save(self, directory: Path) -> None:
        """Writes nothing."""


def _write_description(directory: Path, kind: str, tokenizer: Tokenizer, end: str | None = None) -> None:
    description = {
        "tokenizer": kind,
        "vocabulary": tokenizer.vocabulary,
        "end_of_document": tokenizer.end_of_document,
        "end_of_document_token": end,
        "fingerprint": tokenizer.fingerprint,
    }
    write_atomically(directory / DESCRIPTION_FILE, json.dumps(description, indent=1) + "\n")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Loads a tokenizer saved by `Tokenizer.save`. Raises UserError if a file is missing or not as it was written."""
    try:
        description = json.loads((directory / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        kind, end = description["tokenizer"], description["end_of_document_token"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / DESCRIPTION_FILE} is missing or damaged ({error}): restore the file.") from error
    tokenizer = ByteTokenizer() if kind == BYTES else read_tokenizer(directory / TOKENIZER_FILE, end)
    if tokenizer.fingerprint != description.get("fingerprint"):
        raise UserError(f"{directory / TOKENIZER_FILE} is not the file that was saved there: restore it.")
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """The content of the files that `Tokenizer.save` writes, by name."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(Path(directory))
        return {file.name: file.read_bytes().decode() for file in sorted(Path(directory).iterdir())}


def tokenizer_from_files(files: Mapping[str, str]) -> Tokenizer:
    """The tokenizer whose `tokenizer_files` these are. Raises UserError as `load_tokenizer`."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            (Path(directory) / name).write_bytes(text.encode())
        return load_tokenizer(Path(directory))


def read_tokenizer(file: Path, end_of_document: str | None = None) -> JsonTokenizer:
    """Reads a `tokenizer.json`. Raises UserError if the file cannot be read; otherwise as for `JsonTokenizer`."""
    try:
        text = file.read_bytes().decode("utf-8-sig")  # read_text would convert line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the tokenizer {file} cannot be read: {error}.") from error
    return JsonTokenizer(text, end_of_document, str(file))


def train_bpe(texts: Iterable[str], vocabulary: int) -> JsonTokenizer:
    """Trains a byte-level BPE with at most `vocabulary` tokens, including `<|endoftext|>`. It is deterministic.

    Raises:
        UserError: the vocabulary is too small for the 256 bytes and the end-of-document token.
    """
    if vocabulary < 257:
        raise UserError(
            f"vocabulary is {vocabulary}, but it must be at least 257: 256 bytes and the end of a document."
        )
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
    """The bytes of a text, including those that `surrogateescape` represents."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # JSON can contain half of a surrogate pair
        return text.encode(errors="surrogatepass")


def valid_text(text: str) -> str:
    """The text with U+FFFD for bytes that are not valid UTF-8."""
    return text_bytes(text).decode(errors="replace")


def _byte_characters() -> list[str]:
    """The character for each byte in a byte-level tokenizer (GPT-2's table): itself if it is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
