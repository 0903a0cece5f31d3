"""Windows of a corpus: random ones for training, evenly spread ones for validation."""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, UInt8


class _RandomWindow(grain.transforms.RandomMap):
    """Cuts a window at a place that depends on the window's index and the seed, and on nothing else."""

    def __init__(self, tokens: UInt8[np.ndarray, " tokens"], context: int):
        self._tokens, self._context = tokens, context

    def random_map(self, element: int, rng: np.random.Generator) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        del element
        start = rng.integers(len(self._tokens) - self._context)
        return self._tokens[start : start + self._context + 1].astype(np.int32)


def training_batches(
    tokens: UInt8[np.ndarray, " tokens"], context: int, batch_size: int, seed: int, start: int
) -> Iterator[Int32[np.ndarray, "B T_and_next"]]:
    """Endless batches `[B, T + 1]` of random windows; a window's last T tokens are the targets of its first T.

    The batches from `start` on are those that an iterator from 0 gives after `start` batches.
    """
    endless = grain.MapDataset.range(2**40)
    windows = endless.seed(seed).random_map(_RandomWindow(tokens, context)).batch(batch_size)[start:]
    return iter(windows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def spread_windows(
    tokens: UInt8[np.ndarray, " tokens"], context: int, count: int
) -> Int32[np.ndarray, "windows T_and_next"]:
    """At most `count` windows `[T + 1]`, spread evenly from the first token to the last; no two share a target."""
    count = min(count, (len(tokens) - 1) // context)
    last = len(tokens) - 1 - context
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    return np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int32)
