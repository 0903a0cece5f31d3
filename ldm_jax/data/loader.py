"""Training batches and validation windows from one or several corpora."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Float, Int32, UInt8, UInt64

from ldm_jax.config import Corpus, DataConfig
from ldm_jax.data.byte_corpus import load_byte_corpus
from ldm_jax.data.prepared_corpus import PreparedCorpus, load_prepared
from ldm_jax.data.tokenizer import ByteTokenizer, Tokenizer
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


class MixtureCorpus(NamedTuple):
    """A corpus and its share of the mixture."""

    name: str
    train: TokenSequence
    validation: TokenSequence
    bytes_per_token: float
    """Of the validation part."""
    weight: float
    """Fraction of all windows; the weights of all corpora sum to 1."""


@dataclass(frozen=True, eq=False)
class Data:
    """The corpora of a run, and the windows that they are cut into."""

    corpora: tuple[MixtureCorpus, ...]
    tokenizer: Tokenizer
    fingerprint: str
    """A hash of the corpora, their order and weights."""
    context: int
    separate_documents: bool
    training_windows: Callable[[int], grain.MapDataset]
    """The endless sequence of windows `[T + 1]` for a seed."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token of the validation windows, to convert nats per token into bits per byte.

        It is 1 for a byte corpus, where the end of a document counts as a byte.
        """
        return sum(corpus.weight * corpus.bytes_per_token for corpus in self.corpora)

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

    def validation_windows(self, count: int) -> ValidationWindows:
        """About `count` windows, spread evenly over the validation parts, by weight; at least one for each corpus."""
        windows, weights = [], []
        for corpus in self.corpora:
            part = spread_windows(corpus.validation, self.context, max(1, round(corpus.weight * count)))
            windows.extend(part)
            weights.append(np.full(len(part), corpus.weight / len(part)))
        return ValidationWindows(self._batch(windows), np.concatenate(weights) * len(windows))

    def _batch(self, windows: Sequence[Int32[np.ndarray, " T_and_next"]]) -> Batch:
        tokens = np.stack(windows)
        if not self.separate_documents:
            return Batch(tokens, None)
        ends = np.cumsum(tokens == self.tokenizer.end_of_document, axis=1, dtype=np.int32)
        return Batch(tokens, 1 + np.pad(ends[:, :-1], ((0, 0), (1, 0))))

    def describe(self) -> str:
        """One line: tokens of both parts, bytes per token, and the mixture."""
        train, validation = (
            sum(len(getattr(corpus, part)) for corpus in self.corpora) for part in ("train", "validation")
        )
        text = f"{train:,} tokens to train on, {validation:,} held out"
        if not isinstance(self.tokenizer, ByteTokenizer):
            text += f", {self.bytes_per_token:.2f} bytes a token"
        if len(self.corpora) > 1:
            text += "; " + ", ".join(f"{corpus.weight:.0%} {corpus.name}" for corpus in self.corpora)
        return text


def load_data(config: DataConfig, vocabulary: int) -> Data:
    """Loads the data of a config for a model with `vocabulary` tokens.

    Raises:
        UserError: a corpus cannot be read, is damaged or has less than one window; corpora have different tokenizers;
            the tokenizer has more tokens than the model.
    """
    data = _load_prepared_data(config) if config.kind is Corpus.PREPARED else _load_byte_data(config)
    if data.tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"model.vocabulary is {vocabulary}, but the tokenizer of the data has {data.tokenizer.vocabulary} tokens: "
            f"set model.vocabulary to {data.tokenizer.vocabulary} or more."
        )
    return data


def _load_byte_data(config: DataConfig) -> Data:
    corpus = load_byte_corpus(config)
    return Data(
        (MixtureCorpus(config.path or Corpus.STDLIB, corpus.train, corpus.validation, 1.0, 1.0),),
        ByteTokenizer(),
        corpus.fingerprint,
        config.context,
        config.separate_documents,
        functools.partial(random_windows, corpus.train, config.context),
    )


def _load_prepared_data(config: DataConfig) -> Data:
    corpora = [load_prepared(Path(directory).expanduser(), config.verify) for directory in config.corpora]
    for directory, corpus in zip(config.corpora, corpora, strict=True):
        _check_corpus(directory, corpus, config.context)
        if corpus.tokenizer.fingerprint != corpora[0].tokenizer.fingerprint:
            raise UserError(
                f"{directory} has another tokenizer than {config.corpora[0]}, so they cannot be mixed: prepare both "
                f"with --tokenizer {config.corpora[0]}/tokenizer.json."
            )
    weights = config.weights or [float(len(corpus.train)) for corpus in corpora]
    shares = np.array(weights) / sum(weights)
    mixture = " ".join(f"{corpus.fingerprint} {share}" for corpus, share in zip(corpora, shares, strict=True))
    return Data(
        tuple(
            MixtureCorpus(Path(directory).name, corpus.train, corpus.validation, corpus.bytes_per_token, float(share))
            for directory, corpus, share in zip(config.corpora, corpora, shares, strict=True)
        ),
        corpora[0].tokenizer,
        hashlib.blake2b(mixture.encode()).hexdigest()[:16],
        config.context,
        config.separate_documents,
        functools.partial(shuffled_windows, [corpus.train for corpus in corpora], shares.tolist(), config.context),
    )


def _check_corpus(directory: str, corpus: PreparedCorpus, context: int) -> None:
    for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
        if len(tokens) <= context:
            raise UserError(
                f"the {part} part of the corpus {directory} has {len(tokens):,} tokens, but one window needs "
                f"{context + 1:,}: lower data.context, or prepare more text."
            )
    if (windows := count_windows(corpus.train, context)) > MAX_WINDOWS:
        raise UserError(
            f"the corpus {directory} has {windows:,} windows, but at most {MAX_WINDOWS:,} can be shuffled: raise "
            "data.context, or prepare its files as several corpora."
        )


class _RandomWindow(grain.transforms.RandomMap):
    def __init__(self, tokens: UInt8[np.ndarray, " tokens"], context: int):
        self._tokens, self._context = tokens, context

    def random_map(self, element: int, rng: np.random.Generator) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        del element
        start = rng.integers(len(self._tokens) - self._context)
        return self._tokens[start : start + self._context + 1].astype(np.int32)


def random_windows(tokens: UInt8[np.ndarray, " tokens"], context: int, seed: int) -> grain.MapDataset:
    """Endless windows `[T + 1]` at random positions. A window depends only on its index and the seed."""
    return grain.MapDataset.range(ENDLESS).seed(seed).random_map(_RandomWindow(tokens, context))


class _ConsecutiveWindows:
    """All windows of a part in order; the last token of one is the first token of the next."""

    def __init__(self, tokens: TokenSequence, context: int):
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return count_windows(self._tokens, self._context)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " T_and_next"]:
        start = index * self._context
        return np.asarray(self._tokens[start : start + self._context + 1], np.int32)


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
        grain.MapDataset.source(_ConsecutiveWindows(tokens, context)).shuffle(int(corpus_seed)).repeat()
        for tokens, corpus_seed in zip(corpora, seeds, strict=True)
    ]
    return grain.MapDataset.mix(windows, weights) if len(windows) > 1 else windows[0]


def spread_windows(tokens: TokenSequence, context: int, count: int) -> Int32[np.ndarray, "windows T_and_next"]:
    """At most `count` windows `[T + 1]`, spread evenly from the first token to the last; no two share a target."""
    count = min(count, count_windows(tokens, context))
    last = len(tokens) - 1 - context
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    return np.stack([np.asarray(tokens[start : start + context + 1], np.int32) for start in starts])
