"""Wall time of several functions measured in one run, so that disturbances affect all of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.train.step import make_state, make_train_step


def alternating(functions: Sequence[Callable[[], Any]], repetitions: int, warm_up: int = 2) -> list[list[float]]:
    """Seconds of every call of each function; the functions alternate. The first `warm_up` rounds do not count."""
    times: list[list[float]] = [[] for _ in functions]
    for repetition in range(-warm_up, repetitions):
        for function, seconds in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            if repetition >= 0:
                seconds.append(time.perf_counter() - start)
    return times


def step_runner(config: Config, batch: Batch) -> Callable[[], Any]:
    """A function whose every call runs the next training step of a new model on the same batch."""
    step, state = make_train_step(config), make_state(config)

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return run
