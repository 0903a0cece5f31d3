"""Memories without a covariance, under the same signature: what the regression is compared with.

Both leave `P` as it is, so `init_state` starts them, too. One token, one group.
"""

from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import apply_matrix, outer
from ldm_jax.typing import InverseCovarianceLike, MemoryLike, State


def additive_write(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> State:
    """The outer-product memory: `M <- lambda M + beta v k'`.

    With forgetting and importance 1 it is `V'K`: the regression's solution with the Gram matrix of the keys taken for
    the identity. Shapes and errors as in `rls_correction`.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    key, value, forgetting, importance = obs
    return forgetting * memory + importance * outer(value, key), inverse_covariance


def delta_write(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> State:
    """The delta rule: `M <- lambda M + beta (v - lambda M k) k'`.

    One gradient step on the newest observation's squared error. Importance is a step size here: with keys of unit
    length it must lie in [0, 1], a larger one overshoots, and one of 2 or more diverges on a repeated key; this is
    not checked. Shapes and errors as in `rls_correction`.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    key, value, forgetting, importance = obs
    faded = forgetting * memory
    error = value - apply_matrix(faded, key)
    return faded + importance * outer(error, key), inverse_covariance
