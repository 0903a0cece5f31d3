"""The regression that a depth memory solves, and its batch solution: the reference for every write.

With observations `i = 0..l`, key `k_i`, value `v_i`, forgetting `lambda_i` and importance `beta_i`:

    J(M) = sum_i (prod_{j>i} lambda_j) beta_i |v_i - M k_i|^2  +  (prod_j lambda_j) / alpha |M|^2

The ridge is discounted like the observations. One token, one group.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory import checks
from ldm_jax.memory.observation import Observation, checked_observations
from ldm_jax.typing import MemoryLike, Scalar, ScalarLike, State


def _weights(observations: Observation, alpha: ScalarLike) -> tuple[Float[Array, " N"], Scalar]:
    """The weights of the squared errors `[N]` and of `|M|^2` `[]`. Checks alpha and N."""
    if observations.forgetting.size < 1:
        raise ValueError("the number of observations is 0, but it must be at least 1.")
    dtype = observations.forgetting.dtype
    checks.check_alpha(alpha, dtype)
    later = jnp.cumprod(observations.forgetting[::-1])[::-1]  # prod_{j >= i}
    after = jnp.concatenate([later[1:], jnp.ones_like(later[:1])])  # prod_{j > i}
    return after * observations.importance, later[0] / jnp.asarray(alpha, dtype)


def regression_objective(memory: MemoryLike, observations: Observation, alpha: ScalarLike) -> Scalar:
    """`J(M)`: the discounted, weighted squared error of the memory, plus the discounted ridge.

    Args:
        memory: M `[V, K]`.
        observations: key `[N, K]`, value `[N, V]`, forgetting and importance `[N]`, N >= 1.
        alpha: inverse of the ridge, positive.

    Raises:
        ValueError: a wrong shape; or, for concrete values, forgetting, importance or alpha out of range.
    """
    observations, value_dim, key_dim = checked_observations(observations)
    checks.check_shape("the memory", memory, (value_dim, key_dim), "V, K")
    memory = jnp.asarray(memory, observations.key.dtype)
    weights, ridge = _weights(observations, alpha)
    predictions = jnp.einsum("VK,NK->NV", memory, observations.key, precision=jax.lax.Precision.HIGHEST)
    errors = jnp.sum((observations.value - predictions) ** 2, axis=-1)
    return jnp.sum(weights * errors) + ridge * jnp.sum(memory**2)


def solve_depth_regression(observations: Observation, alpha: ScalarLike) -> State:
    """The minimiser of `regression_objective` and the inverse covariance, from all observations at once.

        A = sum_i w_i k_i k_i' + w I        M = (sum_i w_i v_i k_i') A^-1        P = A^-1

    with the weights of `J`. It is differentiable, and computed in the observations' type, at least float32; pass
    float64 observations to use it as a reference. Arguments and errors as in `regression_objective`.

    Returns:
        M `[V, K]` and P `[K, K]`.
    """
    observations, _, key_dim = checked_observations(observations)
    weights, ridge = _weights(observations, alpha)
    key, value = observations.key, observations.value
    gram = jnp.einsum("N,NK,NL->KL", weights, key, key, precision=jax.lax.Precision.HIGHEST)
    moments = jnp.einsum("N,NV,NK->VK", weights, value, key, precision=jax.lax.Precision.HIGHEST)
    covariance = gram + ridge * jnp.eye(key_dim, dtype=gram.dtype)
    state = jnp.linalg.solve(covariance, moments.T).T, jnp.linalg.inv(covariance)
    checks.check_result(state)
    return state
