"""Recursive least squares (RLS): solves the depth regression recursively, one observation at a time.

`RLS` is the arithmetic, for a `MemoryState`. The public functions apply it to a memory `M` `[V, K]` and an inverse
covariance `P` `[K, K]`, and check their arguments. They take one token and one group: use `jax.vmap` for groups, tokens
and batch. Everything is computed in the type of the state.

Source: Haykin, Adaptive Filter Theory, chapter on RLS; extended by importance and by the discount of the ridge.
"""

from typing import NamedTuple

import jax.export
import jax.numpy as jnp

from ldm_jax.memory import checks
from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import combine, scaled_square, symmetric
from ldm_jax.memory.write import (
    Covariance,
    CovarianceRule,
    Gain,
    add_error,
    rebase,
    regression_rule,
    subtract_error,
)
from ldm_jax.typing import (
    DType,
    InverseCovarianceLike,
    Key,
    KeyLike,
    MemoryLike,
    Scalar,
    ScalarLike,
    State,
    Value,
)


def _start(key_dim: int, alpha: ScalarLike, dtype: DType) -> Covariance:
    """`P = alpha I`."""
    return Covariance(jnp.asarray(alpha, dtype) * jnp.eye(key_dim, dtype=dtype), jnp.ones((), dtype))


def _gain(covariance: Covariance, observation: Observation) -> Gain:
    """`u = P k`, `w = beta / (discount lambda)`, `g = w / (1 + w k'u)`. Forgetting enters the write through `w`."""
    matrix, discount = covariance
    scale = rebase(discount) ** 2
    weight = observation.importance / (scale * discount * observation.forgetting)
    u = combine(observation.key, scale * symmetric(matrix))
    return Gain(u, weight / (1 + weight * jnp.sum(observation.key * u)), discount)


def _advance(covariance: Covariance, gain: Gain, forgetting: Scalar) -> Covariance:
    """`P - g u u'`, symmetric to the bit, and the discount times lambda."""
    scale = rebase(covariance.discount) ** 2
    matrix = scale * symmetric(covariance.matrix) - scaled_square(gain.size, gain.direction)
    return Covariance(matrix, scale * covariance.discount * forgetting)


def _retreat(covariance: Covariance, gain: Gain) -> Covariance:
    """`P + g u u'`, and the earlier discount: the inverse of `_advance`."""
    matrix = symmetric(covariance.matrix) + scaled_square(gain.size, gain.direction)
    return Covariance(matrix / rebase(gain.discount) ** 2, gain.discount)


def _project(covariance: Covariance, query: Key) -> Key:
    return combine(query, symmetric(covariance.matrix)) / covariance.discount


LARGEST_ALPHA, SMALLEST_FORGETTING = 1e4, 0.1
RLS = regression_rule(CovarianceRule(_start, _gain, _advance, _retreat, _project, LARGEST_ALPHA, SMALLEST_FORGETTING))


class Correction(NamedTuple):
    """`(e, u, s)`: what a write computes from the state, and the residual that is needed to undo it."""

    error: Value
    """`e = v - M k`, the prediction error of the memory before the write."""
    projected_key: Key
    """`u = P k`."""
    innovation: Scalar
    """`s = lambda + beta k'u`, positive: the variance of the innovation in units of the noise."""


jax.export.register_namedtuple_serialization(Correction, serialized_name="ldm_jax.Correction")


def init_state(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType = jnp.float32) -> State:
    """The memory before the first observation: `M = 0` `[V, K]` and `P = alpha I` `[K, K]`.

    Args:
        value_dim: V, at least 1.
        key_dim: K, at least 1.
        alpha: inverse of the ridge, positive and at most 1e4, in float64 5e12; may be traced.
        dtype: floating type of the state, which writes preserve.

    Raises:
        ValueError: value_dim or key_dim is below 1, or alpha is out of range.
        TypeError: dtype is not floating, or is float64 while JAX's 64-bit mode is off.
    """
    dtype = checks.checked_state_type(dtype)
    checks.check_dims(value_dim, key_dim)
    checks.check_alpha(alpha, dtype, LARGEST_ALPHA * checks.precision(dtype))
    return jnp.zeros((value_dim, key_dim), dtype), _start(key_dim, alpha, dtype).matrix


def rls_correction(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> Correction:
    """What a write computes from the state `(M, P)`: `e = v - M k`, `u = P k`, `s = lambda + beta k'u`.

    Args:
        memory: M `[V, K]`.
        inverse_covariance: P `[K, K]`, symmetric.
        obs: key `[K]`, value `[V]`, forgetting and importance `[]`; cast to the state's type.

    Raises:
        ValueError: a wrong shape; or, for concrete values, forgetting outside (0, 1], importance negative, anything not
            finite, or importance so large that `P` would lose all digits.
        TypeError: M and P have different types.
    """
    memory, matrix, obs = checked_arguments(memory, inverse_covariance, obs)
    u = _gain(Covariance(matrix, jnp.ones_like(obs.forgetting)), obs).direction
    error = obs.value - combine(obs.key, memory.T)
    variance = jnp.sum(obs.key * u)
    checks.check_importance_for(variance / obs.forgetting, obs.importance, memory.dtype)
    return Correction(error, u, obs.forgetting + obs.importance * variance)


def rls_apply(
    memory: MemoryLike, inverse_covariance: InverseCovarianceLike, correction: Correction, obs: Observation
) -> State:
    """The state after the write: `M + (beta/s) e u'` and `(P - (beta/s) u u') / lambda`.

    Shapes and errors as in `rls_correction`.
    """
    memory, matrix, obs = checked_arguments(memory, inverse_covariance, obs)
    one = jnp.ones_like(obs.forgetting)
    gain = Gain(correction.projected_key, obs.importance / correction.innovation, one)
    after = _advance(Covariance(matrix, one), gain, obs.forgetting)
    return add_error(memory.T, gain, correction.error).T, after.matrix / obs.forgetting


def rls_undo(
    memory: MemoryLike, inverse_covariance: InverseCovarianceLike, correction: Correction, obs: Observation
) -> State:
    """The state before the write, from the state after it: `M - (beta/s) e u'` and `lambda P + (beta/s) u u'`.

    The only divisor is `s >= lambda`. In float32 the relative error of `P` is about 1e-7; that of `M` is about 1e-7 of
    the largest `|M|` over depth. Shapes and errors as in `rls_correction`.
    """
    memory, matrix, obs = checked_arguments(memory, inverse_covariance, obs)
    gain = Gain(correction.projected_key, obs.importance / correction.innovation, jnp.ones_like(obs.forgetting))
    before = _retreat(Covariance(obs.forgetting * matrix, obs.forgetting), gain)
    return subtract_error(memory.T, gain, correction.error).T, before.matrix


def rls_write(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> State:
    """One exact step of the depth regression: `(M, P)` after the observation, from `(M, P)` before it.

        u = P k                    s = lambda + beta k'u            e = v - M k
        M <- M + (beta/s) e u'     P <- (P - (beta/s) u u') / lambda

    After any number of writes `M` minimises `regression_objective`; `solve_depth_regression` computes the same
    minimiser in one solve. `P` stays symmetric to the bit. Shapes and errors as in `rls_correction`.
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
    return combine(jnp.asarray(query, memory.dtype), memory.T)
