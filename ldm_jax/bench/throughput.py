"""Measure tokens a second: of the loader, of a training step, and of generation with and without a cache."""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ldm_jax.bench.table import Row
from ldm_jax.bench.timing import alternating, step_runner
from ldm_jax.config import Config
from ldm_jax.data import load_data
from ldm_jax.infer import generate
from ldm_jax.nn import init_params, model_graph

BATCHES = 50  # per measurement: more than the loader prefetches
GENERATED_TOKENS = 32  # per sequence and measurement
GENERATION_BATCHES = (1, 8)


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


def generation_rows(config: Config, repetitions: int) -> Iterator[Row]:
    """Median tokens a second of a config's model with random parameters on this machine; the two ways alternate.

    Without a cache, every token takes a forward pass over a whole window of `data.context` tokens.
    """
    graph, context = model_graph(config.model, config.mixer), config.data.context
    params = init_params(config.model, config.mixer, 0)

    @jax.jit
    def next_window(params: Any, window: Any) -> Any:
        model = nnx.merge(graph, params)
        last = model.logits(model.hidden(window)[:, -1])
        return jnp.concatenate([window[:, 1:], jnp.argmax(last, axis=-1)[:, None].astype(window.dtype)], axis=1)

    def cached(batch_size: int) -> Any:
        tokens = generate(graph, params, [[0] * context] * batch_size, context)
        return lambda: list(itertools.islice(tokens, GENERATED_TOKENS))

    def uncached(batch_size: int) -> Any:
        def run() -> Any:
            window = jnp.zeros((batch_size, context), jnp.int32)
            for _ in range(GENERATED_TOKENS):
                window = jax.block_until_ready(next_window(params, window))
            return window

        return run

    names = str(config.mixer.kind), None, None, None, config.model.depth, str(config.model.compute_dtype)
    for batch_size in GENERATION_BATCHES:
        times = alternating([cached(batch_size), uncached(batch_size)], repetitions)
        for what, each in zip(("cached", "uncached"), times, strict=True):
            rate = batch_size * GENERATED_TOKENS / statistics.median(each)
            yield Row(f"{what}, B {batch_size}", *names, rate, "tokens/s", None)
