"""The final state of a depth memory, by a scan over given observations."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from ldm_jax.memory import checks
from ldm_jax.memory.observation import Observation, checked_observations
from ldm_jax.memory.rls import init_state, rls_write
from ldm_jax.typing import Init, ScalarLike

WriteFunction = Callable[[Array, Any, Observation], tuple[Array, Any]]


def depth_memory_loop(
    observations: Observation,
    value_dim: int,
    key_dim: int,
    alpha: ScalarLike,
    write: WriteFunction = rls_write,
    init: Init = init_state,
) -> tuple[Array, Any]:
    """The state after all observations: a `jax.lax.scan` of `write` over the depth axis, starting from `init`.

    Args:
        observations: key `[N, K]`, value `[N, V]`, forgetting and importance `[N]`; N may be 0.
        value_dim: V.
        key_dim: K.
        alpha: inverse of the ridge, positive.
        write: a function with the signature of `rls_write`: `sqrt_rls_write` (with `init=sqrt_init_state`),
            `additive_write`, `delta_write`, or your own.
        init: `(value_dim, key_dim, alpha) -> (M, P)`. It determines the state's type: for a float64 state pass
            `functools.partial(init_state, dtype=jnp.float64)`.

    Returns:
        M `[V, K]` and P `[K, K]` (`Covariance(S, discount)` for the square root).

    Raises:
        ValueError: a wrong shape; or, for concrete values, forgetting, importance or alpha out of range, or a state
            that is not finite.
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
    checks.check_result(state)
    return state
