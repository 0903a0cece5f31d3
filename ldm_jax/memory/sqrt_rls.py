"""RLS in square-root form: carries a factor `S` with `P = S S'`, for deep stacks and nearly collinear keys.

`P` cannot lose symmetry or positive definiteness, because it is never formed. `SQRT_RLS` is the arithmetic, for a
`MemoryState`. The public functions take and return a `Covariance(S, discount)`, with `S S' = discount * P`, where those
of `rls` take and return `P`. `S` is never divided by the root of lambda, whose rounding would add up over writes. One
token, one group.

Source: Potter's square-root update (Bierman, Factorization Methods for Discrete Sequential Estimation), with
forgetting and importance.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory import checks
from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import combine, outer
from ldm_jax.memory.write import (
    Covariance,
    CovarianceRule,
    FactorGain,
    Gain,
    Residual,
    add_error,
    rebase,
    regression_rule,
    subtract_error,
)
from ldm_jax.typing import (
    DType,
    InverseCovariance,
    Key,
    Memory,
    MemoryLike,
    Scalar,
    ScalarLike,
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


LARGEST_ALPHA, SMALLEST_FORGETTING = 1e8, 0.01
SQRT_RLS = regression_rule(
    CovarianceRule(_start, _gain, _advance, _retreat, _project, LARGEST_ALPHA, SMALLEST_FORGETTING)
)


def sqrt_init_state(
    value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType = jnp.float32
) -> tuple[Memory, Covariance]:
    """The memory before the first observation: `M = 0` `[V, K]`, and `S = sqrt(alpha) I` `[K, K]` with a discount of 1.

    Arguments and errors as in `init_state`, but alpha may be up to 1e8, in float64 3e25.
    """
    dtype = checks.checked_state_type(dtype)
    checks.check_dims(value_dim, key_dim)
    checks.check_alpha(alpha, dtype, LARGEST_ALPHA * checks.precision(dtype) ** 2)
    return jnp.zeros((value_dim, key_dim), dtype), _start(key_dim, alpha, dtype)


def _checked(
    memory: MemoryLike, covariance: Covariance, obs: Observation
) -> tuple[Float[Array, "K V"], Covariance, Observation]:
    """Checks the arguments of a write, and casts them to the state's type: `M'`, the covariance and the observation."""
    if not isinstance(covariance, Covariance):
        raise TypeError(
            f"the covariance is a {type(covariance).__name__}, but it must be a Covariance: the state of "
            "sqrt_init_state or of a write."
        )
    memory, factor, obs = checked_arguments(memory, covariance.matrix, obs)
    checks.check_shape("the discount", covariance.discount, (), "")
    return memory.T, Covariance(factor, jnp.asarray(covariance.discount, memory.dtype)), obs


def sqrt_rls_correction(memory: MemoryLike, covariance: Covariance, obs: Observation) -> Residual:
    """What a write computes from the state: the error `e = v - M k` and the gain.

    Shapes and errors as in `rls_correction`, with `Covariance(S, discount)` in place of P.
    """
    rows, covariance, obs = _checked(memory, covariance, obs)
    gain = _gain(covariance, obs)
    assert gain.factor is not None
    variance = jnp.sum(gain.factor.key**2) / (rebase(gain.discount) ** 2 * gain.discount)
    checks.check_importance_for(variance / obs.forgetting, obs.importance, rows.dtype, power=2)
    return Residual(obs.value - combine(obs.key, rows), gain)


def sqrt_rls_apply(
    memory: MemoryLike, covariance: Covariance, correction: Residual, obs: Observation
) -> tuple[Memory, Covariance]:
    """The state after the write: `M + g e u'` and `S - step u f'`, and the discount times lambda.

    Shapes and errors as in `rls_correction`, with `Covariance(S, discount)` in place of P.
    """
    rows, covariance, obs = _checked(memory, covariance, obs)
    error, gain = correction
    return add_error(rows, gain, error).T, _advance(covariance, gain, obs.forgetting)


def sqrt_rls_undo(
    memory: MemoryLike, covariance: Covariance, correction: Residual, obs: Observation
) -> tuple[Memory, Covariance]:
    """The state before the write, from the state after it: `M - g e u'`, `S + step u f'`, and the earlier discount.

    Shapes and errors as in `rls_correction`, with `Covariance(S, discount)` in place of P.
    """
    rows, covariance, _ = _checked(memory, covariance, obs)
    error, gain = correction
    return subtract_error(rows, gain, error).T, _retreat(covariance, gain)


def sqrt_rls_write(memory: MemoryLike, covariance: Covariance, obs: Observation) -> tuple[Memory, Covariance]:
    """One exact step of the depth regression. `M` and `S S' / discount` equal `M` and `P` of `rls_write`.

    Shapes and errors as in `rls_correction`, with `Covariance(S, discount)` in place of P.
    """
    return sqrt_rls_apply(memory, covariance, sqrt_rls_correction(memory, covariance, obs), obs)
