"""Windows of tokens: where the training windows lie, and which are held out."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int32, UInt8, UInt64

ENDLESS = 2**40
MAX_WINDOWS = 2**32 - 1  # of one corpus: Grain shuffles indices of 32 bits


@runtime_checkable
class Stream(Protocol):
    """Tokens in a row, such as an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, tokens: slice, /) -> Any: ...


class _RandomWindow(grain.transforms.RandomMap):
    """Cuts a window at a place that depends on the window's index and the seed, and on nothing else."""

    def __init__(self, tokens: UInt8[np.ndarray, " tokens"], context: int):
        self._tokens, self._context = tokens, context

    def random_map(self, element: int, rng: np.random.Generator) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        del element
        start = rng.integers(len(self._tokens) - self._context)
        return self._tokens[start : start + self._context + 1].astype(np.int32)


def random_windows(tokens: UInt8[np.ndarray, " tokens"], context: int, seed: int) -> grain.MapDataset:
    """Endless windows `[T + 1]` at random places; a window's last T tokens are the targets of its first T."""
    return grain.MapDataset.range(ENDLESS).seed(seed).random_map(_RandomWindow(tokens, context))


class _ConsecutiveWindows:
    """All windows of a stream, one after the other; the last token of one is the first of the next."""

    def __init__(self, tokens: Stream, context: int):
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return count_windows(self._tokens, self._context)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " T_and_next"]:
        start = index * self._context
        return np.asarray(self._tokens[start : start + self._context + 1], np.int32)


def count_windows(tokens: Stream, context: int) -> int:
    """How many windows of T targets a stream has; what is left at its end is less than one."""
    return (len(tokens) - 1) // context


def shuffled_windows(streams: Sequence[Stream], weights: Sequence[float], context: int, seed: int) -> grain.MapDataset:
    """Endless windows `[T + 1]` of several streams, mixed by weight.

    Each stream is gone through in a random order, in another one every time it begins anew. Which window has which
    index depends on the streams, the weights, the context and the seed, and on nothing else.
    """
    # Grain seeds the shuffle of epoch e by seed + e: nearby seeds, or corpora, would repeat each other's orders.
    seeds: UInt64[np.ndarray, " streams"] = np.random.SeedSequence(seed).generate_state(len(streams))
    every = [
        grain.MapDataset.source(_ConsecutiveWindows(tokens, context)).shuffle(int(each)).repeat()
        for tokens, each in zip(streams, seeds, strict=True)
    ]
    return grain.MapDataset.mix(every, weights) if len(every) > 1 else every[0]


def spread_windows(tokens: Stream, context: int, count: int) -> Int32[np.ndarray, "windows T_and_next"]:
    """At most `count` windows `[T + 1]`, spread evenly from the first token to the last; no two share a target."""
    count = min(count, count_windows(tokens, context))
    last = len(tokens) - 1 - context
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    return np.stack([np.asarray(tokens[start : start + context + 1], np.int32) for start in starts])
