"""The delta rule, `M <- lambda M + beta (v - lambda M k) k'`: a baseline for the regression."""

from ldm_jax.memory.observation import Observation, checked_arguments
from ldm_jax.memory.products import combine, outer
from ldm_jax.memory.write import MemoryState, WriteRule, start_without_covariance
from ldm_jax.typing import InverseCovarianceLike, MemoryLike, State


def _write(state: MemoryState, observation: Observation) -> tuple[MemoryState, None]:
    key, value, forgetting, importance = observation
    discounted = forgetting * state.memory
    error = value - combine(key, discounted)
    return MemoryState(discounted + outer(importance * key, error), None), None


DELTA = WriteRule(start_without_covariance, _write)


def delta_write(memory: MemoryLike, inverse_covariance: InverseCovarianceLike, obs: Observation) -> State:
    """`M <- lambda M + beta (v - lambda M k) k'`; `P` is returned unchanged.

    One gradient step on the squared error of the newest observation, with importance as the step size. For keys of unit
    length it should lie in [0, 1]: larger steps overshoot, and steps of 2 or more diverge if a key repeats. This is
    not checked. One token, one group. Shapes and errors as in `rls_correction`.
    """
    memory, inverse_covariance, obs = checked_arguments(memory, inverse_covariance, obs)
    after, _ = _write(MemoryState(memory.T, None), obs)
    return after.memory.T, inverse_covariance
