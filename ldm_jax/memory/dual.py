"""The read without the memory: a weighted sum of the values observed so far.

`M q = sum_i c_i v_i` with `c_i = (prod_{j>i} lambda_j) beta_i k_i'(P q)`. Only `P` is carried; the values are kept as
they are. The weights `c_i` say how much every earlier layer contributes to a read.

One token, one group.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory import checks
from ldm_jax.memory.observation import Observation, checked_observations
from ldm_jax.memory.products import apply_matrix
from ldm_jax.memory.rls import project_key
from ldm_jax.typing import InverseCovarianceLike, KeyLike, Value


def discounts(forgetting: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
    """How much is left of each observation: `prod_{j>i} lambda_j`, the forgetting of all that came after it."""
    after = jnp.concatenate([forgetting[1:], jnp.ones_like(forgetting[:1])])
    return jnp.cumprod(after[::-1], axis=0)[::-1]


def dual_weights(
    inverse_covariance: InverseCovarianceLike, query: KeyLike, observations: Observation
) -> Float[Array, " N"]:
    """The weight of every observation in a read: `c_i = (prod_{j>i} lambda_j) beta_i k_i'(P q)`.

    Args:
        inverse_covariance: P `[K, K]` after all the observations, as `rls_write` leaves it; the identity for the
            additive memory.
        query: `[K]`.
        observations: key `[N, K]`, value `[N, V]`, forgetting and importance `[N]`; the values are not looked at.

    Raises:
        ValueError: a wrong shape; outside a trace, inadmissible forgetting or importance.
    """
    observations, _, key_dim = checked_observations(observations)
    checks.check_shape("the query", query, (key_dim,), "K")
    checks.check_shape("the inverse covariance", inverse_covariance, (key_dim, key_dim), "K, K")
    key, _, forgetting, importance = observations
    inverse_covariance = jnp.asarray(inverse_covariance)
    projected, _ = project_key(inverse_covariance, jnp.asarray(query, inverse_covariance.dtype))
    return discounts(forgetting) * importance * apply_matrix(key, projected.astype(key.dtype))


def dual_read(
    inverse_covariance: InverseCovarianceLike, query: KeyLike, observations: Observation
) -> tuple[Value, Float[Array, " N"]]:
    """The read `sum_i c_i v_i`, equal to `rls_read(M, query)`, and the weights `c`. Arguments as in `dual_weights`."""
    weights = dual_weights(inverse_covariance, query, observations)
    values = jnp.asarray(observations.value, weights.dtype)
    return apply_matrix(values.T, weights), weights
