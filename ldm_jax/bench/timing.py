"""Wall time of several things in one run, so that what disturbs one disturbs all."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def alternating(runs: Sequence[Callable[[], Any]], repetitions: int, warm_up: int = 2) -> list[list[float]]:
    """Seconds of each, taking turns; the first rounds, which compile and warm up, do not count."""
    times: list[list[float]] = [[] for _ in runs]
    for repetition in range(-warm_up, repetitions):
        for run, each in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repetition >= 0:
                each.append(time.perf_counter() - start)
    return times
