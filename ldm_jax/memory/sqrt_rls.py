"""RLS in square-root form: carries a factor `S` with `P = S S'`, for deep stacks and nearly collinear keys.

`P` cannot lose symmetry or positive definiteness, because it is never formed. `SQRT_RLS` is the arithmetic, for a
`MemoryState`. The public functions take and return `S` where those of `rls` take and return `P`. One token, one group.

Source: Potter's square-root update (Bierman, Factorization Methods for Discrete Sequential Estimation), with
forgetting and importance.
"""

import jax.numpy as jnp

from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import combine, outer
from ldm_jax.memory.rls import Correction, init_state
from ldm_jax.memory.write import (
    Covariance,
    CovarianceRule,
    FactorGain,
    Gain,
    add_error,
    rebase,
    regression_rule,
    subtract_error,
)
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


def _start(key_dim: int, alpha: ScalarLike, dtype: DType) -> Covariance:
    """`S = sqrt(alpha) I`."""
    return Covariance(jnp.sqrt(jnp.asarray(alpha, dtype)) * jnp.eye(key_dim, dtype=dtype), jnp.ones((), dtype))


def _gain(covariance: Covariance, observation: Observation) -> Gain:
    """`f = S'k`, `u = S f`, `w = beta / (discount lambda)`, `s = 1 + w f'f`, `g = w / s`."""
    factor, discount = covariance
    scale = rebase(discount)
    weight = observation.importance / (scale**2 * discount * observation.forgetting)
    f = scale * combine(observation.key, factor)
    s = 1 + weight * jnp.sum(f * f)
    u = scale * combine(f, factor.T)
    return Gain(u, weight / s, discount, FactorGain(f, _step(weight, s)))


def _step(weight: Scalar, s: Scalar) -> Scalar:
    return weight / (s + jnp.sqrt(s))


def _advance(covariance: Covariance, gain: Gain, forgetting: Scalar) -> Covariance:
    """`S - step u f'`, and the discount times lambda."""
    scale = rebase(covariance.discount)
    matrix = scale * covariance.matrix - _rank_one(gain)
    return Covariance(matrix, scale**2 * covariance.discount * forgetting)


def _retreat(covariance: Covariance, gain: Gain) -> Covariance:
    """`S + step u f'`, and the earlier discount: the inverse of `_advance`."""
    return Covariance((covariance.matrix + _rank_one(gain)) / rebase(gain.discount), gain.discount)


def _rank_one(gain: Gain) -> InverseCovariance:
    assert gain.factor is not None
    return outer(gain.factor.step * gain.direction, gain.factor.key)


def _project(covariance: Covariance, query: Key) -> Key:
    return combine(combine(query, covariance.matrix), covariance.matrix.T) / covariance.discount


SQRT_RLS = regression_rule(CovarianceRule(_start, _gain, _advance, _retreat, _project))


def sqrt_init_state(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType = jnp.float32) -> State:
    """The memory before the first observation: `M = 0` `[V, K]` and `S = sqrt(alpha) I` `[K, K]`.

    Arguments and errors as in `init_state`.
    """
    memory, _ = init_state(value_dim, key_dim, alpha, dtype)
    return memory, _start(key_dim, alpha, memory.dtype).matrix


def _gain_of(correction: Correction, factor_key: Key, obs: Observation) -> Gain:
    """The gain from a public correction, whose `s` is `lambda` times that of `_gain`."""
    _, u, s = correction
    step = _step(obs.importance / obs.forgetting, s / obs.forgetting)
    return Gain(u, obs.importance / s, jnp.ones_like(obs.forgetting), FactorGain(factor_key, step))


def sqrt_rls_correction(memory: MemoryLike, factor: InverseCovarianceLike, obs: Observation) -> Correction:
    """`e = v - M k`, `u = P k = S f` with `f = S'k`, and `s = lambda + beta f'f`.

    Shapes and errors as in `rls_correction`, with S in place of P.
    """
    memory, factor, obs = checked_arguments(memory, factor, obs)
    gain = _gain(Covariance(factor, jnp.ones_like(obs.forgetting)), obs)
    assert gain.factor is not None
    s = obs.forgetting + obs.importance * jnp.sum(gain.factor.key**2)
    return Correction(obs.value - combine(obs.key, memory.T), gain.direction, s)


def sqrt_rls_apply(
    memory: MemoryLike, factor: InverseCovarianceLike, correction: Correction, obs: Observation
) -> State:
    """The state after the write: `M + (beta/s) e u'` and `(S - beta u f' / (s + sqrt(s lambda))) / sqrt(lambda)`.

    Shapes and errors as in `rls_correction`, with S in place of P.
    """
    memory, factor, obs = checked_arguments(memory, factor, obs)
    gain = _gain_of(correction, combine(obs.key, factor), obs)
    after = _advance(Covariance(factor, gain.discount), gain, obs.forgetting)
    return add_error(memory.T, gain, correction.error).T, after.matrix / jnp.sqrt(obs.forgetting)


def sqrt_rls_undo(memory: MemoryLike, factor: InverseCovarianceLike, correction: Correction, obs: Observation) -> State:
    """The state before the write, from the state after it: `M - (beta/s) e u'` and
    `sqrt(lambda) S + beta u f' / (s + sqrt(s lambda))`.

    `f = sqrt(s) S'k` is computed from the factor after the write, whose rounding error is amplified by
    `sqrt(s / lambda)`. Shapes and errors as in `rls_correction`, with S in place of P.
    """
    memory, factor, obs = checked_arguments(memory, factor, obs)
    gain = _gain_of(correction, jnp.sqrt(correction.innovation) * combine(obs.key, factor), obs)
    before = _retreat(Covariance(jnp.sqrt(obs.forgetting) * factor, obs.forgetting), gain)
    return subtract_error(memory.T, gain, correction.error).T, before.matrix


def sqrt_rls_write(memory: MemoryLike, factor: InverseCovarianceLike, obs: Observation) -> State:
    """One exact step of the depth regression on `(M, S)`. `M` and `S S'` equal `M` and `P` of `rls_write`.

    Shapes and errors as in `rls_correction`, with S in place of P.
    """
    return sqrt_rls_apply(memory, factor, sqrt_rls_correction(memory, factor, obs), obs)
