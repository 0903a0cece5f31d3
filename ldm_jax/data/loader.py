"""Training batches and validation windows from one or several corpora."""

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Float, Int32, UInt, UInt8, UInt64

from ldm_jax.config import Corpus, DataConfig
from ldm_jax.data.byte_corpus import corpus_files, corpus_name, load_byte_corpus, load_bytes
from ldm_jax.data.documents import FileSource, matching_files, share_warning
from ldm_jax.data.prepared_corpus import load_prepared
from ldm_jax.data.tokenizer import ByteTokenizer, Tokenizer, text_bytes, token_dtype
from ldm_jax.errors import UserError

THREADS = 4
PREFETCHED_BATCHES = 4
ENDLESS = 2**40
MAX_WINDOWS = 2**32 - 1
"""Per corpus: Grain shuffles 32-bit indices."""


@runtime_checkable
class TokenSequence(Protocol):
    """A sequence of tokens, such as an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, tokens: slice, /) -> Any: ...


class Batch(NamedTuple):
    """Windows of T + 1 tokens: the last T tokens are the targets of the first T."""

    tokens: Int32[np.ndarray, "B T_and_next"]
    segments: Int32[np.ndarray, "B T_and_next"] | None
    """The number of each token's document within its window: 1, 2, ... An end-of-document token belongs to the document
    that it ends. None unless `data.separate_documents`."""


class ValidationWindows(NamedTuple):
    """Windows of held-out text."""

    windows: Batch
    weights: Float[np.ndarray, " windows"]
    """Weight of each window in the mean loss; 1 on average. Each corpus has its share of the mixture, however few
    windows it has."""


class Part(NamedTuple):
    """The training or the validation text of a corpus."""

    name: str
    """The corpus, as in the config."""
    tokens: TokenSequence
    weight: float
    """Fraction of all windows; the weights of all corpora sum to 1."""
    bytes_per_token: float = math.nan
    """Bytes of text per token, without the end-of-document tokens. Known for validation text only."""


@dataclass(frozen=True, eq=False)
class ValidationText:
    """Text to evaluate a model on."""

    validation: tuple[Part, ...]
    tokenizer: Tokenizer
    context: int
    separate_documents: bool

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, without the end-of-document tokens, for `make_evaluate`. 1 if tokens are bytes."""
        return sum(part.weight * part.bytes_per_token for part in self.validation)

    def validation_windows(self, count: int) -> ValidationWindows:
        """About `count` windows, spread evenly over the text, by weight; at least one for each corpus."""
        windows, weights = [], []
        for part in self.validation:
            spread = spread_windows(part.tokens, self.context, max(1, round(part.weight * count)))
            windows.extend(spread)
            weights.append(np.full(len(spread), part.weight / len(spread)))
        return ValidationWindows(self._batch(windows), np.concatenate(weights) * len(windows))

    def _batch(self, windows: Sequence[Int32[np.ndarray, " T_and_next"]]) -> Batch:
        tokens = np.stack(windows)
        if not self.separate_documents:
            return Batch(tokens, None)
        ends = np.cumsum(tokens == self.tokenizer.end_of_document, axis=1, dtype=np.int32)
        return Batch(tokens, 1 + np.pad(ends[:, :-1], ((0, 0), (1, 0))))


@dataclass(frozen=True, eq=False)
class Data(ValidationText):
    """The training and validation text of a run, and the windows that it is cut into."""

    training: tuple[Part, ...]
    fingerprint: str
    """A hash of the corpora, their order and weights."""
    training_windows: Callable[[int], grain.MapDataset]
    """The endless sequence of windows `[T + 1]` for a seed."""
    warnings: tuple[str, ...] = ()
    """Sentences, without a full stop, about an unusual split or vocabulary."""

    def batches(self, start: int, batch_size: int, seed: int, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Endless batches, starting at window number `start`.

        The windows of a seed are one sequence. Batches of any size on any number of hosts read it in the same order, so
        the number of windows consumed is all the state that a run needs to resume.

        Args:
            start: windows consumed so far, by all hosts.
            batch_size: windows per batch, over all hosts.
            seed: seed of the order.
            rows: the rows of each batch to return on this host. None: all.
        """
        windows = self.training_windows(seed)
        rows = range(batch_size) if rows is None else rows

        def read(number: int) -> Batch:
            first = start + number * batch_size
            return self._batch([np.asarray(windows[first + row]) for row in rows])

        batches = grain.MapDataset.range((len(windows) - start) // batch_size).map(read)
        return iter(
            batches.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=PREFETCHED_BATCHES))
        )

    def describe(self) -> str:
        """One line: tokens of both parts, bytes per token, and the mixture."""
        train, validation = (sum(len(part.tokens) for part in parts) for parts in (self.training, self.validation))
        text = f"{train:,} tokens to train on, {validation:,} held out"
        if not isinstance(self.tokenizer, ByteTokenizer):
            text += f", {self.bytes_per_token:.2f} bytes a token"
        if len(self.training) > 1:
            text += "; " + ", ".join(f"{part.weight:.0%} {Path(part.name).name}" for part in self.training)
        return text


def load_data(config: DataConfig, vocabulary: int) -> Data:
    """Loads the data of a config for a model with `vocabulary` tokens.

    Raises:
        UserError: a corpus cannot be read, is damaged or has less than one window; corpora have different tokenizers;
            the tokenizer has more tokens than the model.
    """
    data = _load_prepared_data(config) if config.kind is Corpus.PREPARED else _load_byte_data(config)
    tokens = data.tokenizer.vocabulary
    if tokens > vocabulary:
        raise UserError(
            f"model.vocabulary is {vocabulary}, but the tokenizer of the data has {tokens} tokens: set "
            f"model.vocabulary to {tokens} or more."
        )
    _check_length("training", data.training, config.context)
    _check_length("validation", data.validation, config.context)
    if vocabulary < 2 * tokens:
        return data
    warning = f"model.vocabulary is {vocabulary:,}, but the tokenizer of the data has only {tokens:,} tokens"
    return dataclasses.replace(data, warnings=(*data.warnings, warning))


def load_validation_text(path: str, config: DataConfig, tokenizer: Tokenizer) -> ValidationText:
    """Loads other text to evaluate a model on, which was trained on the config's data with this tokenizer.

    `path` is a file, a pattern of files, or a prepared corpus, of which the validation part is used.

    Raises:
        UserError: the text cannot be read, is shorter than one window, or was prepared with another tokenizer.
    """
    part, _ = _read_validation_text(path, config, tokenizer)
    _check_length("validation", [part], config.context)
    return ValidationText((part,), tokenizer, config.context, config.separate_documents)


def _read_validation_text(path: str, config: DataConfig, tokenizer: Tokenizer) -> tuple[Part, str]:
    """The text, and its fingerprint."""
    if (directory := Path(os.path.expanduser(path))).is_dir():
        corpus = load_prepared(directory, config.verify)
        if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{path} has another tokenizer than the model: prepare it with that of the training text, --tokenizer "
                "bytes or the tokenizer.json of the training corpus."
            )
        return Part(path, corpus.validation, 1.0, corpus.bytes_per_token), corpus.fingerprint
    if config.kind is Corpus.PREPARED:
        tokens, bytes_per_token = _encode(FileSource([path], "text"), tokenizer)
    else:
        tokens, bytes_per_token = load_bytes(matching_files(path), config.document_bytes), 1.0
    return Part(path, tokens, 1.0, bytes_per_token), hashlib.blake2b(tokens.tobytes()).hexdigest()[:16]


def _encode(source: FileSource, tokenizer: Tokenizer) -> tuple[UInt[np.ndarray, " tokens"], float]:
    """The tokens of all documents, each followed by the end-of-document token, and the bytes per token."""
    end = np.array([tokenizer.end_of_document])
    pieces, size = [np.zeros(0, np.int64)], 0
    for batch in source.batches(None):
        for text, ids in zip(batch.texts, tokenizer.encode_batch(batch.texts), strict=True):
            pieces += [ids, end] if len(ids) else []
            size += len(text_bytes(text))
    tokens = np.concatenate(pieces).astype(token_dtype(tokenizer.vocabulary))
    return tokens, size / max(np.count_nonzero(tokens != tokenizer.end_of_document), 1)


def _load_byte_data(config: DataConfig) -> Data:
    name, tokenizer, warnings = corpus_name(config), ByteTokenizer(), ()
    if config.validation_path is None:
        train, validation, fingerprint = load_byte_corpus(config)
        warning = share_warning(len(validation) / (len(train) + len(validation)), config.validation_fraction)
        part, warnings = Part(name, validation, 1.0, 1.0), () if warning is None else (warning,)
    else:
        train = load_bytes(corpus_files(config), config.document_bytes)
        part, fingerprint = _read_validation_text(config.validation_path, config, tokenizer)
        warnings = _overlap(config.validation_path, corpus_files(config))
        fingerprint = hashlib.blake2b(train.tobytes() + fingerprint.encode()).hexdigest()[:16]
    return Data(
        (part,),
        tokenizer,
        config.context,
        config.separate_documents,
        (Part(name, train, 1.0),),
        fingerprint,
        functools.partial(random_windows, train, config.context),
        warnings,
    )


def _overlap(validation_path: str, training: Sequence[Path]) -> tuple[str, ...]:
    """A sentence, without its full stop, if there is training text among the files of data.validation_path."""
    if os.path.isdir(os.path.expanduser(validation_path)):  # a prepared corpus
        return ()
    files = {file.resolve() for file in matching_files(validation_path)}
    if not (common := len(files & {file.resolve() for file in training})):
        return ()
    return (f"{common} of the {len(files)} files of data.validation_path are training text, too",)


def _load_prepared_data(config: DataConfig) -> Data:
    corpora = [load_prepared(Path(os.path.expanduser(directory)), config.verify) for directory in config.corpora]
    tokenizer, warnings = corpora[0].tokenizer, []
    for directory, corpus in zip(config.corpora, corpora, strict=True):
        if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{directory} has another tokenizer than {config.corpora[0]}, so they cannot be mixed: prepare both "
                f"with --tokenizer {config.corpora[0]}/tokenizer.json."
            )
        if (windows := count_windows(corpus.train, config.context)) > MAX_WINDOWS:
            raise UserError(
                f"the corpus {directory} has {windows:,} windows, but at most {MAX_WINDOWS:,} can be shuffled: raise "
                "data.context, or prepare its files as several corpora."
            )
        sizes = len(corpus.train), len(corpus.validation)
        if config.validation_path is None and all(sizes):
            warning = share_warning(sizes[1] / sum(sizes), corpus.validation_fraction)
            warnings += [] if warning is None else [f"{directory}: {warning}"]
    weights = config.weights or [float(len(corpus.train)) for corpus in corpora]
    shares = [weight / (sum(weights) or 1.0) for weight in weights]
    mixture = " ".join(f"{corpus.fingerprint} {share}" for corpus, share in zip(corpora, shares, strict=True))
    parts = list(zip(config.corpora, corpora, shares, strict=True))
    if config.validation_path is None:
        validation = tuple(
            Part(name, corpus.validation, share, corpus.bytes_per_token) for name, corpus, share in parts
        )
    else:
        part, fingerprint = _read_validation_text(config.validation_path, config, tokenizer)
        validation, mixture = (part,), f"{mixture} {fingerprint}"
    return Data(
        validation,
        tokenizer,
        config.context,
        config.separate_documents,
        tuple(Part(name, corpus.train, share) for name, corpus, share in parts),
        hashlib.blake2b(mixture.encode()).hexdigest()[:16],
        functools.partial(shuffled_windows, [corpus.train for corpus in corpora], shares, config.context),
        tuple(warnings),
    )


def _check_length(kind: str, parts: Sequence[Part], context: int) -> None:
    for part in parts:
        if len(part.tokens) <= context:
            how = " (data.validation_path, or --validation-fraction of prepare_data.py)" if kind == "validation" else ""
            raise UserError(
                f"the {kind} part of the corpus {part.name} has {len(part.tokens):,} tokens, but one window needs "
                f"{context + 1:,}: lower data.context, or add text{how}."
            )


def random_windows(tokens: UInt8[np.ndarray, " tokens"], context: int, seed: int) -> grain.MapDataset:
    """Endless windows `[T + 1]` at random positions. A window depends only on its index and the seed."""

    def window(_: int, rng: np.random.Generator) -> Int32[np.ndarray, " T_and_next"]:
        start = rng.integers(len(tokens) - context)
        return tokens[start : start + context + 1].astype(np.int32)

    return grain.MapDataset.range(ENDLESS).seed(seed).random_map(window)


def _consecutive_windows(tokens: TokenSequence, context: int) -> grain.MapDataset:
    """All windows in order; the last token of one is the first token of the next."""
    starts = grain.MapDataset.range(0, context * count_windows(tokens, context), context)
    return starts.map(lambda start: np.asarray(tokens[start : start + context + 1], np.int32))


def count_windows(tokens: TokenSequence, context: int) -> int:
    """The number of windows with T targets each; the remaining tokens at the end are not used."""
    return (len(tokens) - 1) // context


def shuffled_windows(
    corpora: Sequence[TokenSequence], weights: Sequence[float], context: int, seed: int
) -> grain.MapDataset:
    """Endless windows `[T + 1]` of several corpora, mixed by weight.

    Every epoch of a corpus has all its windows once, in a new random order. The sequence depends only on the corpora,
    the weights, the context and the seed.
    """
    # Grain shuffles epoch e with seed + e, so with nearby seeds one corpus would repeat the order of another.
    seeds: UInt64[np.ndarray, " corpora"] = np.random.SeedSequence(seed).generate_state(len(corpora))
    windows = [
        _consecutive_windows(tokens, context).shuffle(int(corpus_seed)).repeat()
        for tokens, corpus_seed in zip(corpora, seeds, strict=True)
    ]
    return grain.MapDataset.mix(windows, weights) if len(windows) > 1 else windows[0]


def spread_windows(tokens: TokenSequence, context: int, count: int) -> Int32[np.ndarray, "windows T_and_next"]:
    """At most `count` windows `[T + 1]`, spread evenly from the first token to the last; no two share a target."""
    count = min(count, count_windows(tokens, context))
    last = len(tokens) - 1 - context
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    return np.stack([np.asarray(tokens[start : start + context + 1], np.int32) for start in starts])
