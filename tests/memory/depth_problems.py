"""Random depth regressions, and the ways through them that the tests of the memory share."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldm_jax import (
    Observation,
    init_state,
    rls_apply,
    rls_correction,
    rls_undo,
    rls_write,
    solve_depth_regression,
    sqrt_init_state,
    sqrt_rls_apply,
    sqrt_rls_correction,
    sqrt_rls_undo,
    sqrt_rls_write,
)


class Form(NamedTuple):
    init: Callable
    write: Callable
    correction: Callable
    apply: Callable
    undo: Callable
    covariance: Callable
    """What the state carries beside M, `[..., K, K]`, to `P`."""


RLS = Form(init_state, rls_write, rls_correction, rls_apply, rls_undo, lambda inverse_covariance: inverse_covariance)
SQRT = Form(
    sqrt_init_state,
    sqrt_rls_write,
    sqrt_rls_correction,
    sqrt_rls_apply,
    sqrt_rls_undo,
    lambda factor: factor @ factor.swapaxes(-1, -2),
)
FORMS = {"rls": RLS, "sqrt": SQRT}


def random_observations(
    rng: np.random.Generator,
    depth: int,
    value_dim: int,
    key_dim: int,
    forgetting: float | tuple[float, float] = 0.9,
    importance: float | tuple[float, float] = (0.2, 2.0),
    shared: float = 0.0,
) -> Observation:
    """Unit keys; `shared` is the weight of a direction common to all. Exact float32 numbers, in NumPy."""
    key = unit(rng.normal(size=(depth, key_dim)))
    key = unit((1 - shared) * key + shared * unit(rng.normal(size=key_dim)))
    forgetting, importance = (
        np.full(depth, part) if np.isscalar(part) else rng.uniform(*part, size=depth)
        for part in (forgetting, importance)
    )
    return cast(Observation(key, rng.normal(size=(depth, value_dim)), forgetting, importance), np.float32)


def unit(array: np.ndarray) -> np.ndarray:
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def cast(observations: Observation, dtype) -> Observation:
    return Observation(*(np.asarray(part, dtype) for part in observations))


def relative(actual, expected) -> float:
    """The largest difference over the largest `|expected|`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.max(np.abs(actual - expected)) / np.max(np.abs(expected))


def each_state(write: Callable, state: tuple, observations: Observation) -> tuple:
    """The states after every write: M `[N, V, K]` and P `[N, K, K]`."""

    def step(state, observation):
        after = write(*state, observation)
        return after, after

    return jax.lax.scan(step, state, observations)[1]


@partial(jax.jit, static_argnames=("init", "write", "dtype"))
def deep_states(init, write, dtype, observations, alpha):
    """`each_state` from the start, in `dtype`."""
    state = init(observations.value.shape[1], observations.key.shape[1], alpha, dtype=dtype)
    return each_state(write, state, observations)


@jax.jit
def prefix_solutions(observations, alpha):
    """The batch solution of every prefix: later observations get importance 0 and forget nothing."""
    depth = observations.forgetting.shape[0]
    seen = jnp.tril(jnp.ones((depth, depth), bool))
    forgetting = jnp.where(seen, observations.forgetting, 1)
    importance = jnp.where(seen, observations.importance, 0)
    return jax.vmap(
        lambda forgetting, importance: solve_depth_regression(
            Observation(observations.key, observations.value, forgetting, importance), alpha
        )
    )(forgetting, importance)
