"""Measure how fast windows are loaded, and how fast a training step uses them."""

import itertools
import statistics
from collections.abc import Iterator

from ldm_jax.bench.table import Row
from ldm_jax.bench.timing import alternating, step_runner
from ldm_jax.config import Config
from ldm_jax.data import load_data

BATCHES = 50  # per measurement: more than the loader prefetches


def loader_rows(config: Config, repetitions: int) -> Iterator[Row]:
    """Median tokens a second of a config's loader and of its training step; the two alternate. Raises UserError."""
    batch_size, seed = config.train.batch_size, config.train.seed
    batches = load_data(config.data, config.model.vocabulary).batches(0, batch_size, seed)
    train = step_runner(config, next(batches))

    def read() -> None:
        for _ in itertools.islice(batches, BATCHES):
            pass

    reading, training = (statistics.median(times) for times in alternating([read, train], repetitions))
    per_batch = batch_size * config.data.context
    names = str(config.mixer.kind), str(config.mixer.backward_or_default), None, None
    for what, rate in (("loader", BATCHES * per_batch / reading), ("step", per_batch / training)):
        yield Row(what, *names, config.model.depth, str(config.model.compute_dtype), rate, "tokens/s", None)
