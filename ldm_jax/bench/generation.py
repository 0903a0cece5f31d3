"""Measure how fast tokens are generated, with and without the key-value cache."""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ldm_jax.bench.table import Row
from ldm_jax.bench.timing import alternating
from ldm_jax.config import Config
from ldm_jax.infer import generate
from ldm_jax.nn import init_params, model_graph

TOKENS = 32  # generated per sequence and measurement
BATCH_SIZES = (1, 8)


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
        return lambda: list(itertools.islice(tokens, TOKENS))

    def uncached(batch_size: int) -> Any:
        def run() -> Any:
            window = jnp.zeros((batch_size, context), jnp.int32)
            for _ in range(TOKENS):
                window = jax.block_until_ready(next_window(params, window))
            return window

        return run

    names = str(config.mixer.kind), None, None, None, config.model.depth, str(config.model.compute_dtype)
    for batch_size in BATCH_SIZES:
        times = alternating([cached(batch_size), uncached(batch_size)], repetitions)
        for what, each in zip(("cached", "uncached"), times, strict=True):
            rate = batch_size * TOKENS / statistics.median(each)
            yield Row(f"{what}, B {batch_size}", *names, rate, "tokens/s", None)
