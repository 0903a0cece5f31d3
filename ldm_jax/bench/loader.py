"""How fast windows are read, beside how fast they are trained on."""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from ldm_jax.bench.timing import alternating
from ldm_jax.bench.training import Row
from ldm_jax.config import Config
from ldm_jax.data import load_data
from ldm_jax.train.step import make_state, make_train_step

BATCHES = 50  # read at a time: more than are read ahead


def loader_rows(config: Config, repetitions: int) -> Iterator[Row]:
    """Tokens a second of the loader and of the training step of a config on this machine, taking turns; medians.

    Raises:
        UserError: the data of the config cannot be read.
    """
    batch_size, seed = config.train.batch_size, config.train.seed
    batches = load_data(config.data, config.model.vocabulary).batches(0, batch_size, seed)
    batch = next(batches)
    step, state = make_train_step(config), make_state(config)

    def read() -> None:
        for _ in itertools.islice(batches, BATCHES):
            pass

    def train() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    reading, training = (statistics.median(times) for times in alternating([read, train], repetitions))
    per_batch = batch_size * config.data.context
    names = str(config.mixer.kind), str(config.mixer.backward), None, None
    for what, rate in (("loader", BATCHES * per_batch / reading), ("step", per_batch / training)):
        yield Row(what, *names, config.model.depth, str(config.model.compute_dtype), rate, "tokens/s", None)
