"""Recursive least squares (RLS): the depth regression kept solved, one observation at a time.

One token, one group: groups and batch are `jax.vmap` over these functions. All arithmetic is done in the type of the
state.

Source: Haykin, Adaptive Filter Theory, chapter on RLS; here with importance and with the ridge discounted, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ldm_jax.memory import checks
from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import apply_matrix, outer
from ldm_jax.typing import (
    DType,
    InverseCovariance,
    InverseCovarianceLike,
    Key,
    KeyLike,
    MemoryLike,
    Scalar,
    ScalarLike,
    State,
    Value,
)


class Correction(NamedTuple):
    """`(e, u, s)`: all that a write computes from the state, and all that is needed to undo it."""

    error: Value
    """`e = v - M k`, the prediction error against the memory before the write."""
    projected_key: Key
    """`u = P k`."""
    innovation: Scalar
    """`s = lambda + beta k'u`, positive: the innovation's variance in units of the noise."""


def init_state(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType = jnp.float32) -> State:
    """The memory before the first observation: `M = 0` `[V, K]` and `P = alpha I` `[K, K]`.

    Args:
        value_dim: V, at least 1.
        key_dim: K, at least 1.
        alpha: one over the ridge, positive; may be traced.
        dtype: the floating type that the state keeps.

    Raises:
        ValueError: a width below 1, or alpha not positive and finite.
        TypeError: a type that is not floating, or float64 while JAX's 64-bit mode is off.
    """
    dtype = _state_type(dtype)
    checks.check_dims(value_dim, key_dim)
    checks.check_alpha(alpha, dtype)
    return jnp.zeros((value_dim, key_dim), dtype), jnp.asarray(alpha, dtype) * jnp.eye(key_dim, dtype=dtype)


def _state_type(dtype: DType) -> jnp.dtype:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"the state's type is {jnp.dtype(dtype)}, but it must be a floating one, such as float32.")
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError('a float64 state needs JAX\'s 64-bit mode: jax.config.update("jax_enable_x64", True).')
    return jnp.dtype(dtype)


def symmetric(matrix: InverseCovariance) -> InverseCovariance:
    """`(P + P') / 2`. Changes no bit of a symmetric `P`; keeps the cotangent of `P` symmetric.

    Without it an antisymmetric part of the cotangent grows like `lambda^-l` on the way back through the writes.
    """
    return (matrix + matrix.T) / 2


def project_key(inverse_covariance: InverseCovariance, key: Key) -> tuple[Key, Scalar]:
    """`u = P k` and `k'u`."""
    u = apply_matrix(symmetric(inverse_covariance), key)
    return u, jnp.sum(key * u)


def next_covariance(inverse_covariance: InverseCovariance, u: Key, s: Scalar, obs: Observation) -> InverseCovariance:
    """`(P - (beta/s) u u') / lambda`, symmetric to the bit."""
    return (symmetric(inverse_covariance) - (obs.importance / s) * outer(u, u)) / obs.forgetting


def previous_covariance(
    inverse_covariance: InverseCovariance, u: Key, s: Scalar, obs: Observation
) -> InverseCovariance:
    """`lambda P + (beta/s) u u'`: what `next_covariance` was given."""
    return obs.forgetting * symmetric(inverse_covariance) + (obs.importance / s) * outer(u, u)


def rls_correction(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> Correction:
    """What the observation tells a state `(M, P)`: `e = v - M k`, `u = P k`, `s = lambda + beta k'u`.

    Args:
        memory: M `[V, K]`.
        inverse_covariance: P `[K, K]`, symmetric.
        obs: key `[K]`, value `[V]`, forgetting and importance `[]`; cast to the state's type.

    Raises:
        ValueError: a wrong shape; outside a trace, forgetting outside (0, 1] or importance negative or not finite.
        TypeError: M and P of different types.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    u, key_u = project_key(inverse_covariance, obs.key)
    error = obs.value - apply_matrix(memory, obs.key)
    return Correction(error, u, obs.forgetting + obs.importance * key_u)


def rls_apply(
    memory: MemoryLike, inverse_covariance: InverseCovarianceLike, correction: Correction, obs: Observation
) -> State:
    """The state after the write: `M + (beta/s) e u'` and `(P - (beta/s) u u') / lambda`.

    Shapes and errors as in `rls_correction`.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    e, u, s = correction
    return memory + outer(e, (obs.importance / s) * u), next_covariance(inverse_covariance, u, s, obs)


def rls_undo(
    memory: MemoryLike, inverse_covariance: InverseCovarianceLike, correction: Correction, obs: Observation
) -> State:
    """The state before the write, from the state after it: `M - (beta/s) e u'` and `lambda P + (beta/s) u u'`.

    It divides by nothing but `s >= lambda`. In float32 `P` comes back to about 1e-7 relative, `M` to about 1e-7 of
    the largest `|M|` over depth. Shapes and errors as in `rls_correction`.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    e, u, s = correction
    return memory - outer(e, (obs.importance / s) * u), previous_covariance(inverse_covariance, u, s, obs)


def rls_write(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> State:
    """One exact step of the depth regression: `(M, P)` after the observation, from `(M, P)` before it.

        u = P k                    s = lambda + beta k'u            e = v - M k
        M <- M + (beta/s) e u'     P <- (P - (beta/s) u u') / lambda

    After any number of writes `M` is the solution of `regression_objective`, as `solve_depth_regression` finds it in
    one solve. `P` stays symmetric to the bit. Shapes and errors as in `rls_correction`.
    """
    return rls_apply(memory, inverse_covariance, rls_correction(memory, inverse_covariance, obs), obs)


def rls_read(memory: MemoryLike, query: KeyLike) -> Value:
    """The prediction for a query `[K]`: `M q`, shape `[V]`, in the type of `M`.

    Raises:
        ValueError: a wrong shape.
    """
    if jnp.ndim(memory) != 2:
        raise ValueError(f"the memory has shape {jnp.shape(memory)}, but it must be [V, K].")
    memory = jnp.asarray(memory)
    checks.check_shape("the query", query, (memory.shape[1],), "K")
    return apply_matrix(memory, jnp.asarray(query, memory.dtype))
