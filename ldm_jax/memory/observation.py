"""The observation that a layer writes to a depth memory."""

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ldm_jax.memory import checks
from ldm_jax.typing import DType, InverseCovariance, InverseCovarianceLike, Memory, MemoryLike


class Observation(NamedTuple):
    """What one layer writes: a value, the key under which it is stored, and their weights.

    The constructor checks nothing, so `Observation(0, 0, None, 0)` can be used as `in_axes`.
    """

    key: Float[Array, "... K"]
    """`k` `[K]`; it need not have unit length."""
    value: Float[Array, "... V"]
    """`v` `[V]`: the layer's output, or one group of it."""
    forgetting: Float[Array, "..."]
    """`lambda` in (0, 1]: multiplies the weights of all earlier observations and of the ridge."""
    importance: Float[Array, "..."]
    """`beta >= 0`: the weight of this observation's squared error."""

    def astype(self, dtype: DType) -> "Observation":
        """Casts all parts to a type."""
        return Observation(*(jnp.asarray(part, dtype) for part in self))


jax.export.register_namedtuple_serialization(Observation, serialized_name="ldm_jax.Observation")


def checked_arguments(
    memory: MemoryLike, inverse_covariance: InverseCovarianceLike, observation: Observation
) -> tuple[Memory, InverseCovariance, Observation]:
    """Checks a write's arguments and casts them to arrays of the state's type."""
    checks.check_state(memory, inverse_covariance)
    memory, inverse_covariance = jnp.asarray(memory), jnp.asarray(inverse_covariance)
    for name, part in (
        ("the memory", memory),
        ("the inverse covariance", inverse_covariance),
        ("the key", observation.key),
        ("the value", observation.value),
    ):
        checks.check_finite(name, part, memory.dtype)
    value_dim, key_dim = memory.shape
    key, value, forgetting, importance = observation
    checks.check_shape("the key", key, (key_dim,), "K")
    checks.check_shape("the value", value, (value_dim,), "V")
    checks.check_shape("forgetting", forgetting, (), "")
    checks.check_shape("importance", importance, (), "")
    checks.check_forgetting(forgetting, memory.dtype)
    checks.check_importance(importance, memory.dtype)
    return memory, inverse_covariance, Observation(*observation).astype(memory.dtype)


def checked_observations(observations: Observation) -> tuple[Observation, int, int]:
    """Checks observations with a leading depth axis and casts them to arrays. Also returns V and K."""
    key, value, forgetting, importance = observations
    if np.ndim(key) != 2 or np.ndim(value) != 2:
        raise ValueError(
            f"the keys have shape {np.shape(key)} and the values {np.shape(value)}, but they must be [N, K] and "
            "[N, V]: a leading depth axis, one token, one group. Use jax.vmap for groups and batch."
        )
    depth, key_dim = np.shape(key)
    value_dim = np.shape(value)[1]
    checks.check_shape("the value", value, (depth, value_dim), "N, V")
    checks.check_shape("forgetting", forgetting, (depth,), "N")
    checks.check_shape("importance", importance, (depth,), "N")
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(jnp.float32, *observations)
    checks.check_finite("the keys", key, dtype)
    checks.check_finite("the values", value, dtype)
    checks.check_forgetting(forgetting, dtype)
    checks.check_importance(importance, dtype)
    return Observation(*observations).astype(dtype), value_dim, key_dim
