"""RLS in square-root form: carries `S` with `P = S S'`, for long or nearly collinear depth.

`P` cannot lose symmetry or positive definiteness, because it is never formed. The functions take and give `S` where
those of `rls` take and give `P`. One token, one group.

Source: Potter's square-root update (Bierman, Factorization Methods for Discrete Sequential Estimation), with
forgetting and importance.
"""

import jax.numpy as jnp

from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import apply_matrix, outer
from ldm_jax.memory.rls import Correction, init_state
from ldm_jax.typing import (
    DType,
    InverseCovariance,
    InverseCovarianceLike,
    Key,
    MemoryLike,
    Scalar,
    ScalarLike,
    State,
)


def sqrt_init_state(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType = jnp.float32) -> State:
    """The memory before the first observation: `M = 0` `[V, K]` and `S = sqrt(alpha) I` `[K, K]`.

    Arguments and errors as in `init_state`.
    """
    memory, inverse_covariance = init_state(value_dim, key_dim, alpha, dtype)
    return memory, jnp.sqrt(jnp.diagonal(inverse_covariance)) * jnp.eye(key_dim, dtype=memory.dtype)


def half_projected(factor: InverseCovariance, key: Key) -> Key:
    """`f = S'k`."""
    return apply_matrix(factor.T, key)


def project_key(factor: InverseCovariance, key: Key) -> tuple[Key, Scalar]:
    """`u = P k = S f` with `f = S'k`, and `k'u = f'f`."""
    f = half_projected(factor, key)
    return apply_matrix(factor, f), jnp.sum(f * f)


def next_factor(factor: InverseCovariance, u: Key, s: Scalar, obs: Observation) -> InverseCovariance:
    """`(S - beta u f' / (s + sqrt(s lambda))) / sqrt(lambda)` with `f = S'k`."""
    step = obs.importance / (s + jnp.sqrt(s * obs.forgetting))
    return (factor - outer(step * u, half_projected(factor, obs.key))) / jnp.sqrt(obs.forgetting)


def previous_factor(factor: InverseCovariance, u: Key, f: Key, s: Scalar, obs: Observation) -> InverseCovariance:
    """What `next_factor` was given: `sqrt(lambda) S + beta u f' / (s + sqrt(s lambda))`."""
    step = obs.importance / (s + jnp.sqrt(s * obs.forgetting))
    return jnp.sqrt(obs.forgetting) * factor + outer(step * u, f)


def sqrt_rls_correction(memory: MemoryLike, factor: InverseCovarianceLike, obs: Observation) -> Correction:
    """`e = v - M k`, `u = P k = S f` with `f = S'k`, and `s = lambda + beta f'f`.

    Shapes and errors as in `rls_correction`, with S in the place of P.
    """
    memory, factor, obs = checked_arguments(memory, factor, obs)
    u, key_u = project_key(factor, obs.key)
    return Correction(obs.value - apply_matrix(memory, obs.key), u, obs.forgetting + obs.importance * key_u)


def sqrt_rls_apply(
    memory: MemoryLike, factor: InverseCovarianceLike, correction: Correction, obs: Observation
) -> State:
    """The state after the write: `M + (beta/s) e u'` and `(S - beta u f' / (s + sqrt(s lambda))) / sqrt(lambda)`.

    Shapes and errors as in `rls_correction`, with S in the place of P.
    """
    memory, factor, obs = checked_arguments(memory, factor, obs)
    e, u, s = correction
    return memory + outer(e, (obs.importance / s) * u), next_factor(factor, u, s, obs)


def sqrt_rls_undo(memory: MemoryLike, factor: InverseCovarianceLike, correction: Correction, obs: Observation) -> State:
    """The state before the write, from the state after it: `M - (beta/s) e u'`, and S as `previous_factor` has it.

    The later factor gives `f = sqrt(s) S'k`, which amplifies its rounding by `sqrt(s / lambda)`.

    Shapes and errors as in `rls_correction`, with S in the place of P.
    """
    memory, factor, obs = checked_arguments(memory, factor, obs)
    e, u, s = correction
    f = jnp.sqrt(s) * half_projected(factor, obs.key)
    return memory - outer(e, (obs.importance / s) * u), previous_factor(factor, u, f, s, obs)


def sqrt_rls_write(memory: MemoryLike, factor: InverseCovarianceLike, obs: Observation) -> State:
    """One exact step of the depth regression on `(M, S)`; `M` equals that of `rls_write`, and `S S'` its `P`.

    Shapes and errors as in `rls_correction`, with S in the place of P.
    """
    return sqrt_rls_apply(memory, factor, sqrt_rls_correction(memory, factor, obs), obs)
