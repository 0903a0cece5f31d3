"""A synthetic task: recall each layer's output by its key from a memory whose keys are correlated."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory import (
    Observation,
    additive_write,
    delta_write,
    depth_memory_loop,
    rls_read,
    rls_write,
    solve_depth_regression,
)
from ldm_jax.typing import Scalar

WRITES = {"additive": additive_write, "delta": delta_write, "rls": rls_write}
BATCH = "batch solution"


class Task(NamedTuple):
    """Sizes of the task. Layer outputs are independent Gaussian vectors; keys are unit vectors.

    The key of layer `i` is `sqrt(c) a + sqrt(1 - c) b_i`, normalised, with random unit vectors `a`, shared by all
    layers, and `b_i`. So the cosine of two keys is about the correlation `c`. Forgetting and importance are 1.
    """

    layers: int
    key_dim: int = 16
    value_dim: int = 64
    alpha: float = 10.0
    trials: int = 64
    """Number of memories, each with its own keys and values."""


def retrieval_errors(task: Task, correlations: Sequence[float], seed: int = 0) -> dict[str, list[float]]:
    """The error of recalling each layer's output by its key, for each method and correlation.

    The error is `sum |v - g M k|^2 / sum |v|^2` over layers and trials, with the best gain `g` of the method at that
    correlation: 0 is perfect recall, 1 is none. The writes run in float32, the batch solution in float64.

    Raises:
        ValueError: a correlation outside [0, 1], or fewer than one layer or trial.
    """
    if not all(0 <= correlation <= 1 for correlation in correlations):
        raise ValueError(f"the correlations are {tuple(correlations)}, but they must lie in [0, 1].")
    if min(task.layers, task.trials) < 1:
        raise ValueError(f"layers are {task.layers} and trials {task.trials}, but both must be at least 1.")
    measure = jax.jit(lambda observations: {name: _error(_recalled(task, name, observations)) for name in WRITES})
    errors: dict[str, list[float]] = {name: [] for name in [*WRITES, BATCH]}
    for correlation in correlations:
        observations = _observations(task, correlation, jax.random.key(seed))
        for name, error in measure(observations).items():
            errors[name].append(float(error))
        with jax.enable_x64(True):
            exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), observations)
            errors[BATCH].append(float(_error(_recalled(task, BATCH, exact))))
    return errors


Recalled = tuple[Float[Array, "trials N V"], Float[Array, "trials N V"]]


def _observations(task: Task, correlation: float, key: Array) -> Observation:
    shared, own, values = jax.random.split(key, 3)
    leading = task.trials, task.layers

    def unit(x: Array) -> Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    common = unit(jax.random.normal(shared, (task.trials, 1, task.key_dim)))
    apart = unit(jax.random.normal(own, (*leading, task.key_dim)))
    keys = unit(correlation**0.5 * common + (1 - correlation) ** 0.5 * apart)
    ones = jnp.ones(leading)
    return Observation(keys, jax.random.normal(values, (*leading, task.value_dim)), ones, ones)


def _recalled(task: Task, method: str, observations: Observation) -> Recalled:
    """What each layer's key reads from the final memory, and the layer's output."""

    def memory(observations: Observation) -> Array:
        if method == BATCH:
            return solve_depth_regression(observations, task.alpha)[0]
        return depth_memory_loop(observations, task.value_dim, task.key_dim, task.alpha, WRITES[method])[0]

    memories = jax.vmap(memory)(observations)
    return jax.vmap(jax.vmap(rls_read, (None, 0)))(memories, observations.key), observations.value


def _error(recalled: Recalled) -> Scalar:
    read, value = recalled
    gain = jnp.sum(read * value) / jnp.sum(read * read)
    return jnp.sum((value - gain * read) ** 2) / jnp.sum(value * value)
