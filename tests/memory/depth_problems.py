"""Random depth regressions, and the public functions of every write, for the tests of the memory."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax import (
    Observation,
    additive_write,
    delta_write,
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


class PublicWrite(NamedTuple):
    """The public functions of a write. `covariance` maps what the state holds next to M to P, `[..., K, K]`."""

    init: Callable
    write: Callable
    correction: Callable | None = None
    apply: Callable | None = None
    undo: Callable | None = None
    covariance: Callable = lambda inverse_covariance: inverse_covariance


RLS = PublicWrite(init_state, rls_write, rls_correction, rls_apply, rls_undo)
SQRT_RLS = PublicWrite(
    sqrt_init_state,
    sqrt_rls_write,
    sqrt_rls_correction,
    sqrt_rls_apply,
    sqrt_rls_undo,
    lambda covariance: covariance.matrix @ covariance.matrix.swapaxes(-1, -2) / covariance.discount[..., None, None],
)
ADDITIVE, DELTA = PublicWrite(init_state, additive_write), PublicWrite(init_state, delta_write)

REGRESSIONS = {"rls": RLS, "sqrt_rls": SQRT_RLS}
WRITES = {**REGRESSIONS, "additive": ADDITIVE, "delta": DELTA}
each_regression = pytest.mark.parametrize("regression", REGRESSIONS.values(), ids=REGRESSIONS)
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def random_observations(
    rng: np.random.Generator,
    depth: int,
    value_dim: int,
    key_dim: int,
    forgetting: float | tuple[float, float] = 0.9,
    importance: float | tuple[float, float] = (0.2, 2.0),
    shared: float = 0.0,
) -> Observation:
    """Observations with unit keys, in NumPy, exact in float32. `shared` is the weight of a common direction of keys."""
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


def relative(actual, expected, scale: float | None = None) -> float:
    """The largest difference over a scale, by default the largest `|expected|`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return np.max(np.abs(actual - expected)) / (np.max(np.abs(expected)) if scale is None else scale)


def python_loop(write: Callable, state: tuple, observations: Observation) -> tuple:
    """The state after all writes, by a Python loop."""
    for observation in zip(*observations, strict=True):
        state = write(*state, Observation(*observation))
    return state


def every_state(write: Callable, state: tuple, observations: Observation) -> tuple:
    """The states after every write: M `[N, V, K]` and P `[N, K, K]`."""

    def step(state, observation):
        after = write(*state, observation)
        return after, after

    return jax.lax.scan(step, state, observations)[1]


@partial(jax.jit, static_argnames=("init", "write", "dtype"))
def deep_states(init, write, dtype, observations, alpha):
    """`every_state` from the initial state, in `dtype`."""
    state = init(observations.value.shape[1], observations.key.shape[1], alpha, dtype=dtype)
    return every_state(write, state, observations)


@jax.jit
def prefix_solutions(observations, alpha):
    """The batch solution of every prefix. Later observations get importance 0 and forgetting 1."""
    depth = observations.forgetting.shape[0]
    in_prefix = jnp.tril(jnp.ones((depth, depth), bool))
    forgetting = jnp.where(in_prefix, observations.forgetting, 1)
    importance = jnp.where(in_prefix, observations.importance, 0)
    return jax.vmap(
        lambda forgetting, importance: solve_depth_regression(
            Observation(observations.key, observations.value, forgetting, importance), alpha
        )
    )(forgetting, importance)
