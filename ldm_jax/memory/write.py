"""The interface of a write, its state, and the update of `M` that the two regressions share.

A state is `M'` `[K, V]`, the memory transposed so that its widest axis is last, and, for the regressions `rls` and
`sqrt_rls`, a covariance. The modules `rls`, `sqrt_rls`, `additive` and `delta` each define a `WriteRule`, for one token
and one group. Everything is computed in the type of the state; arguments are not checked.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory.observation import Observation
from ldm_jax.memory.products import combine, outer
from ldm_jax.typing import DType, Key, Scalar, ScalarLike, Value


class Covariance(NamedTuple):
    """The inverse covariance of the keys, scaled by the product of forgetting.

    `J_l / prod_{j<=l} lambda_j` is a ridge regression without forgetting whose weights are
    `w_i = beta_i / prod_{j<=i} lambda_j`. So every write is done with forgetting 1 and importance `w`, which results in
    the same `M`, and in `P` times the product of forgetting. The matrix is never divided by lambda; only `rebase`
    multiplies it.
    """

    matrix: Float[Array, "*batch K K"]
    """`discount * P`; for the square root a factor `S` of it, `S S' = discount * P`."""
    discount: Float[Array, "*batch"]
    """The product of forgetting, times the factors applied by `rebase`."""


class MemoryState(NamedTuple):
    """The state of a write; float32 in models, for every compute type."""

    memory: Float[Array, "*batch K V"]
    """`M'`."""
    covariance: Covariance | None
    """None for the writes additive and delta."""


class FactorGain(NamedTuple):
    """The part of a gain that is specific to the square root: `S <- S - step u f'`."""

    key: Float[Array, "*batch K"]
    """`f = S'k`."""
    step: Float[Array, "*batch"]
    """`w / (s + sqrt(s))`."""


class Gain(NamedTuple):
    """The update of a regression's state by an observation: `M' <- M' + g u e'` and `P <- P - g u u'`."""

    direction: Float[Array, "*batch K"]
    """`u = P k`."""
    size: Float[Array, "*batch"]
    """`g = w / s` with `s = 1 + w k'u`."""
    discount: Float[Array, "*batch"]
    """The discount before the write."""
    factor: FactorGain | None = None
    """None except for the square root."""


class Residual(NamedTuple):
    """What a regression's write saves so that it can be undone from the state after it."""

    error: Float[Array, "*batch V"]
    """`e = v - M k`."""
    gain: Gain


for _type in (Covariance, MemoryState, FactorGain, Gain, Residual):
    jax.export.register_namedtuple_serialization(_type, serialized_name=f"ldm_jax.{_type.__name__}")


class CovarianceRule(NamedTuple):
    """The part of a regression's write that depends on the keys only."""

    start: Callable[[int, ScalarLike, DType], Covariance]
    """`(key_dim, alpha, dtype) -> covariance` before the first observation."""
    gain: Callable[[Covariance, Observation], Gain]
    """`(covariance, observation) -> gain`."""
    advance: Callable[[Covariance, Gain, Scalar], Covariance]
    """`(covariance, gain, forgetting) -> covariance` after the observation."""
    retreat: Callable[[Covariance, Gain], Covariance]
    """`(covariance after, gain) -> covariance` before the observation."""
    project: Callable[[Covariance, Key], Key]
    """`(covariance, query) -> P q`."""
    largest_alpha: float
    """The largest alpha for which the error of float32 reads is about 1e-3; see the table in README.md."""
    smallest_forgetting: float
    """The smallest forgetting for which that error stays below 1e-3 over 200 writes; see the table in README.md."""


class WriteRule(NamedTuple):
    """The arithmetic of a write."""

    start: Callable[[int, int, ScalarLike, DType], MemoryState]
    """`(value_dim, key_dim, alpha, dtype) -> state` before the first observation."""
    write: Callable[[MemoryState, Observation], tuple[MemoryState, Residual | None]]
    """`(state, observation) -> (state, residual)`."""
    undo: Callable[[MemoryState, Residual], MemoryState] | None = None
    """`(state after, residual) -> state` before the write; None if it would divide `M` by forgetting."""
    covariance: CovarianceRule | None = None
    """None except for the regressions."""


def start_without_covariance(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType) -> MemoryState:
    """`M = 0`, without a covariance. `alpha` is ignored."""
    del alpha
    return MemoryState(jnp.zeros((key_dim, value_dim), dtype), None)


def read(state: MemoryState, query: Key) -> Value:
    """`M q`."""
    return combine(query, state.memory)


def regression_rule(rule: CovarianceRule) -> WriteRule:
    """The write of a regression: `e = v - M k`, `M' <- M' + g u e'`, and the covariance updated by `rule`."""

    def start(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType) -> MemoryState:
        return MemoryState(jnp.zeros((key_dim, value_dim), dtype), rule.start(key_dim, alpha, dtype))

    def write(state: MemoryState, observation: Observation) -> tuple[MemoryState, Residual]:
        memory, covariance = state
        assert covariance is not None
        gain = rule.gain(covariance, observation)
        error = observation.value - combine(observation.key, memory)
        covariance = rule.advance(covariance, gain, observation.forgetting)
        return MemoryState(add_error(memory, gain, error), covariance), Residual(error, gain)

    def undo(state: MemoryState, residual: Residual) -> MemoryState:
        memory, covariance = state
        assert covariance is not None
        return MemoryState(
            subtract_error(memory, residual.gain, residual.error), rule.retreat(covariance, residual.gain)
        )

    return WriteRule(start, write, undo, rule)


def add_error(memory: Float[Array, "K V"], gain: Gain, error: Value) -> Float[Array, "K V"]:
    """`M' + g u e'`."""
    return memory + outer(gain.size * gain.direction, error)


def subtract_error(memory: Float[Array, "K V"], gain: Gain, error: Value) -> Float[Array, "K V"]:
    """`M' - g u e'`: the inverse of `add_error`."""
    return memory - outer(gain.size * gain.direction, error)


SMALLEST_DISCOUNT = 2.0**-20


def rebase(discount: Scalar) -> Scalar:
    """A power of two `r`: 2^10 if the discount is below 2^-20, else 1.

    Multiplying `P` and the discount by `r^2` is exact and does not change the regression. It keeps the discount, and
    the weights `beta / discount`, in the range of float32 at every depth, if forgetting is at least 1e-6. In directions
    that no key observes, `P` still grows like `lambda^-l`, and in the end overflows.
    """
    return jnp.where(discount < SMALLEST_DISCOUNT, 2.0**10, 1.0).astype(discount.dtype)
