"""The dual form of a read: a weighted sum of the observed values, without the memory `M`.

`M q = sum_i c_i v_i` with `c_i = (prod_{j>i} lambda_j) beta_i k_i'(P q)`. The state is `P` and a cache of the
observations. The weight `c_i` is the contribution of layer `i` to a read.

`dual_read` and `dual_weights` take one token and one group. `Dual` is the form for models.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory import checks
from ldm_jax.memory.depth_cache import ByDepth, DepthCache, GrowingCache, StackedCache
from ldm_jax.memory.observation import Observation, checked_observations
from ldm_jax.memory.products import combine, symmetric
from ldm_jax.memory.recurrent import Alpha, MemoryShape, observe_keys, over_tokens, start_covariance
from ldm_jax.memory.write import Covariance, Gain, WriteRule
from ldm_jax.typing import DType, InverseCovarianceLike, KeyLike, Value


def discounts(forgetting: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
    """The discount of each observation `i`: `prod_{j>i} lambda_j`, the product of the forgetting of later ones."""
    after = jnp.concatenate([forgetting[1:], jnp.ones_like(forgetting[:1])])
    return jnp.cumprod(after[::-1], axis=0)[::-1]


def dual_weights(
    inverse_covariance: InverseCovarianceLike, query: KeyLike, observations: Observation
) -> Float[Array, " N"]:
    """The weight of every observation in a read: `c_i = (prod_{j>i} lambda_j) beta_i k_i'(P q)`.

    Args:
        inverse_covariance: P `[K, K]` after all observations, as returned by `rls_write`; the identity for the additive
            memory.
        query: `[K]`.
        observations: key `[N, K]`, value `[N, V]`, forgetting and importance `[N]`; the values are not used.

    Raises:
        ValueError: a wrong shape; or, for concrete values, forgetting or importance out of range.
    """
    observations, _, key_dim = checked_observations(observations)
    checks.check_shape("the query", query, (key_dim,), "K")
    checks.check_shape("the inverse covariance", inverse_covariance, (key_dim, key_dim), "K, K")
    key, _, forgetting, importance = observations
    inverse_covariance = jnp.asarray(inverse_covariance)
    projected = combine(jnp.asarray(query, inverse_covariance.dtype), symmetric(inverse_covariance))
    return discounts(forgetting) * importance * combine(projected.astype(key.dtype), key.T)


def dual_read(
    inverse_covariance: InverseCovarianceLike, query: KeyLike, observations: Observation
) -> tuple[Value, Float[Array, " N"]]:
    """The read `sum_i c_i v_i`, equal to `rls_read(M, query)`, and the weights `c`. Arguments as in `dual_weights`."""
    weights = dual_weights(inverse_covariance, query, observations)
    values = jnp.asarray(observations.value, weights.dtype)
    return combine(weights, values), weights


class DualState(NamedTuple):
    """The covariance, and the cache of observations with values in the compute type."""

    covariance: Covariance | None
    observations: DepthCache


@dataclass(frozen=True)
class Dual:
    """The dual form: carries the covariance and a cache of the observations. Its reads are those of `Recurrent`."""

    rule: WriteRule
    shape: MemoryShape
    depth: int | None = None
    """Number of observations, if the state is carried by a `jax.lax.scan`; None: the cache grows."""
    dtype: DType = jnp.float32
    """Type of the cached values."""

    def start(self, tokens: tuple[int, ...], alpha: Alpha, first: Observation | None = None) -> DualState:
        """The state before the first write, or after the write of observation 0."""
        groups, value_dim, key_dim = self.shape
        cache = GrowingCache()
        if self.depth is not None:
            scalars = jnp.zeros((*tokens, groups), jnp.float32)
            key, value = (jnp.zeros((*scalars.shape, n)) for n in (key_dim, value_dim))
            forgetting = jnp.ones((groups,), jnp.float32)
            entry = Observation(key.astype(jnp.float32), value.astype(self.dtype), forgetting, scalars)
            cache = StackedCache.empty(self.depth, entry)
        state = DualState(start_covariance(self.rule, self.shape, tokens, alpha), cache)
        return state if first is None else self.write(state, first)[0]

    def weights(self, state: DualState, query: Float[Array, "*tokens G K"]) -> ByDepth:
        """The weight of every observation in a read, each `[*tokens, G]`; 0 for entries not yet written."""
        discount_of_each = discounts(state.observations.stacked(lambda entry: entry.forgetting, 1.0))
        projected = query
        if self.rule.covariance is not None:
            projected = over_tokens(self.rule.covariance.project, query.ndim - 1)(state.covariance, query)

        def weight(entry: Observation, discount: Float[Array, " G"]) -> Float[Array, "*tokens G"]:
            return discount * entry.importance * jnp.sum(entry.key * projected, axis=-1)

        return state.observations.each(weight, discount_of_each)

    def read(
        self, state: DualState, query: Float[Array, "*tokens G K"]
    ) -> tuple[Float[Array, "*tokens G V"], DualState]:
        """`sum_i c_i v_i`, summed in float32; 0 before the first write. The state is unchanged."""
        if isinstance(state.observations, GrowingCache) and not state.observations.entries:
            return jnp.zeros((*query.shape[:-1], self.shape.value_dim), query.dtype), state
        total = state.observations.weighted_sum(self.weights(state, query), lambda entry: entry.value)
        # Without the barrier, XLA for TPUs materialises every weight, broadcast to the width of its value.
        return jax.lax.optimization_barrier(total), state

    def write(self, state: DualState, observation: Observation) -> tuple[DualState, Gain | None]:
        """The state after an observation of every token and group, and the gain."""
        covariance, gain = state.covariance, None
        if covariance is not None:
            covariance, gain = observe_keys(self.rule, covariance, observation)
        key, value, forgetting, importance = observation
        # Forgetting is the same for all tokens. The sum is that of the first one, or 0 if there is none.
        shared = jnp.sum(forgetting.reshape(-1, forgetting.shape[-1])[:1], axis=0)
        entry = Observation(key, value, shared, importance)
        return DualState(covariance, state.observations.append(entry)), gain

    def undo(self, state: DualState, residual: Gain | None) -> DualState:
        """The state before a write."""
        covariance, rule = state.covariance, self.rule.covariance
        if residual is not None and rule is not None:
            covariance = over_tokens(rule.retreat, residual.size.ndim)(covariance, residual)
        return DualState(covariance, state.observations.without_last())
