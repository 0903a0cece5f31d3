"""The outer-product memory, `M <- lambda M + beta v k'`: a baseline for the regression."""

from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import outer
from ldm_jax.memory.write import MemoryState, WriteRule, start_without_covariance
from ldm_jax.typing import InverseCovarianceLike, MemoryLike, State


def _write(state: MemoryState, observation: Observation) -> tuple[MemoryState, None]:
    key, value, forgetting, importance = observation
    return MemoryState(forgetting * state.memory + outer(importance * key, value), None), None


ADDITIVE = WriteRule(start_without_covariance, _write)


def additive_write(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> State:
    """`M <- lambda M + beta v k'`; `P` is returned unchanged.

    With forgetting and importance 1, `M` is `V'K`: the least-squares solution with the Gram matrix of the keys replaced
    by the identity. One token, one group. Shapes and errors as in `rls_correction`.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    after, _ = _write(MemoryState(memory.T, None), obs)
    return after.memory.T, inverse_covariance
