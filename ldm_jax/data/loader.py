"""What training reads: batches from any position, windows held out, and what the tokens are."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Float, Int32

from ldm_jax.config import Corpus, DataConfig
from ldm_jax.data.corpus import load_corpus
from ldm_jax.data.prepared import PreparedCorpus, load_prepared
from ldm_jax.data.tokenizer import ByteTokenizer, Tokenizer
from ldm_jax.data.windows import MAX_WINDOWS, Stream, count_windows, random_windows, shuffled_windows, spread_windows
from ldm_jax.errors import UserError

THREADS = 4
AHEAD = 4  # batches that are read before they are asked for


class Batch(NamedTuple):
    """Windows: the last T tokens of each are the targets of its first T."""

    tokens: Int32[np.ndarray, "B T_and_next"]
    segments: Int32[np.ndarray, "B T_and_next"] | None
    """Which document of its window a token belongs to, 1, 2, ...; the end-of-document token belongs to the one that it
    ends. None unless `data.separate_documents`."""


class HeldOut(NamedTuple):
    """Windows that are not trained on."""

    windows: Batch
    weights: Float[np.ndarray, " windows"]
    """How much each counts, so that a corpus counts by its weight however many windows it has; 1 on average."""


class CorpusParts(NamedTuple):
    """One corpus, as it is trained on."""

    name: str
    train: Stream
    validation: Stream
    bytes_per_token: float
    """Of the validation part."""
    weight: float
    """Its part of all windows; the weights of all corpora add up to 1."""


@dataclass(frozen=True, eq=False)
class Data:
    """Corpora and how they are cut into windows."""

    corpora: tuple[CorpusParts, ...]
    tokenizer: Tokenizer
    fingerprint: str
    """A hash of the corpora, their order and weights."""
    context: int
    separate_documents: bool
    training_windows: Callable[[int], grain.MapDataset]
    """The endless windows `[T + 1]` of a seed, by index."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token of the validation windows, to turn nats a token into bits a byte.

        Of corpora that are read as bytes it is 1: there the end of a document counts as a byte.
        """
        return sum(corpus.weight * corpus.bytes_per_token for corpus in self.corpora)

    def batches(self, start: int, batch_size: int, seed: int, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Endless batches of the windows from number `start` on.

        A position is the number of windows that were consumed: the windows of a seed are one sequence, which batches
        of any size, on any number of hosts, go through in the same order.

        Args:
            start: windows consumed so far, by all hosts.
            batch_size: windows of a batch, of all hosts.
            seed: of the order.
            rows: those rows of every batch that are wanted here. None: all.
        """
        windows = self.training_windows(seed)
        rows = range(batch_size) if rows is None else rows

        def read(number: int) -> Batch:
            first = start + number * batch_size
            return self._batch([np.asarray(windows[first + row]) for row in rows])

        batches = grain.MapDataset.range((len(windows) - start) // batch_size).map(read)
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)))

    def validation_windows(self, count: int) -> HeldOut:
        """About `count` windows, spread evenly over the validation parts, by weight; every corpus has at least one."""
        every = [
            spread_windows(corpus.validation, self.context, max(1, round(corpus.weight * count)))
            for corpus in self.corpora
        ]
        weights = [
            np.full(len(windows), corpus.weight / len(windows))
            for corpus, windows in zip(self.corpora, every, strict=True)
        ]
        found = np.concatenate(weights)
        return HeldOut(self._batch([window for windows in every for window in windows]), found * len(found))

    def _batch(self, windows: Sequence[Int32[np.ndarray, " T_and_next"]]) -> Batch:
        tokens = np.stack(windows)
        if not self.separate_documents:
            return Batch(tokens, None)
        ended = np.cumsum(tokens == self.tokenizer.end_of_document, axis=1, dtype=np.int32)
        return Batch(tokens, 1 + np.pad(ended[:, :-1], ((0, 0), (1, 0))))

    def describe(self) -> str:
        """How many tokens there are to train on and held out, and from where."""
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
    """The data of a config, for a model with `vocabulary` tokens.

    Raises:
        UserError: a corpus that cannot be read, is damaged or has less than a window; corpora with different
            tokenizers; a tokenizer with more tokens than the model.
    """
    data = _prepared_data(config) if config.kind is Corpus.PREPARED else _byte_data(config)
    if data.tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"model.vocabulary is {vocabulary}, but the tokenizer of the data has {data.tokenizer.vocabulary} tokens: "
            f"set model.vocabulary to {data.tokenizer.vocabulary} or more."
        )
    return data


def _byte_data(config: DataConfig) -> Data:
    corpus = load_corpus(config)
    parts = CorpusParts(config.path or Corpus.STDLIB, corpus.train, corpus.validation, 1.0, 1.0)
    windows = functools.partial(random_windows, corpus.train, config.context)
    return Data(
        (parts,), ByteTokenizer(), corpus.fingerprint, config.context, config.separate_documents, windows
    )  # fmt: skip


def _prepared_data(config: DataConfig) -> Data:
    corpora = [load_prepared(Path(folder).expanduser(), config.verify) for folder in config.corpora]
    for folder, corpus in zip(config.corpora, corpora, strict=True):
        _check_corpus(folder, corpus, config.context)
        if corpus.tokenizer.fingerprint != corpora[0].tokenizer.fingerprint:
            raise UserError(
                f"{folder} has another tokenizer than {config.corpora[0]}, so they cannot be mixed: prepare both with "
                f"--tokenizer {config.corpora[0]}/tokenizer.json."
            )
    sizes = [float(len(corpus.train)) for corpus in corpora]
    shares = np.array(config.weights or sizes) / sum(config.weights or sizes)
    parts = tuple(
        CorpusParts(Path(folder).name, corpus.train, corpus.validation, corpus.bytes_per_token, float(share))
        for folder, corpus, share in zip(config.corpora, corpora, shares, strict=True)
    )
    mixture = " ".join(f"{corpus.fingerprint} {share}" for corpus, share in zip(corpora, shares, strict=True))
    streams = [corpus.train for corpus in corpora]
    return Data(
        parts,
        corpora[0].tokenizer,
        hashlib.blake2b(mixture.encode()).hexdigest()[:16],
        config.context,
        config.separate_documents,
        functools.partial(shuffled_windows, streams, shares.tolist(), config.context),
    )


def _check_corpus(folder: str, corpus: PreparedCorpus, context: int) -> None:
    for part, stream in (("training", corpus.train), ("validation", corpus.validation)):
        if len(stream) <= context:
            raise UserError(
                f"the {part} part of the corpus {folder} has {len(stream):,} tokens, but one window needs "
                f"{context + 1:,}: lower data.context, or prepare more text."
            )
    if (windows := count_windows(corpus.train, context)) > MAX_WINDOWS:
        raise UserError(
            f"the corpus {folder} has {windows:,} windows, but no more than {MAX_WINDOWS:,} can be shuffled: raise "
            "data.context, or prepare its files as several corpora."
        )
