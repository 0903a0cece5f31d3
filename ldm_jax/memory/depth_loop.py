"""Observations in, final state out: the scan over observations that are all given beforehand."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from ldm_jax.memory.observation import Observation, checked_observations
from ldm_jax.memory.rls import init_state, rls_write
from ldm_jax.typing import Init, ScalarLike

Write = Callable[[Array, Array, Observation], tuple[Array, Array]]


def depth_memory_loop(
    observations: Observation,
    value_dim: int,
    key_dim: int,
    alpha: ScalarLike,
    write: Write = rls_write,
    init: Init = init_state,
) -> tuple[Array, Array]:
    """The state after all observations: `write` carried over the depth axis by `jax.lax.scan`, from `init`.

    Args:
        observations: key `[N, K]`, value `[N, V]`, forgetting and importance `[N]`; N may be 0.
        value_dim: V.
        key_dim: K.
        alpha: one over the ridge, positive.
        write: `rls_write`, or one with its signature: `sqrt_rls_write` (with `init=sqrt_init_state`),
            `additive_write`, `delta_write`, or your own.
        init: `(value_dim, key_dim, alpha) -> (M, P)`. The state keeps its type: for a float64 state pass
            `functools.partial(init_state, dtype=jnp.float64)`.

    Returns:
        M `[V, K]` and P `[K, K]` (the factor S for the square root).

    Raises:
        ValueError: a wrong shape; outside a trace, inadmissible forgetting, importance or alpha.
    """
    observations, values, keys = checked_observations(observations)
    if (values, keys) != (value_dim, key_dim):
        raise ValueError(
            f"value_dim is {value_dim} and key_dim {key_dim}, but the observations have values of width {values} and "
            f"keys of width {keys}."
        )
    state, _ = jax.lax.scan(
        lambda state, observation: (write(*state, observation), None), init(value_dim, key_dim, alpha), observations
    )
    return state
