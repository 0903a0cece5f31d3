"""What every write has in common: its state, its interface, and the part of a regression's write that changes `M`.

A state is `M'` `[K, V]`, the memory transposed so that its wide axis is the last, and, for the two regressions, a
covariance. The modules `rls`, `sqrt_rls`, `additive` and `delta` each define one `WriteRule`. One token, one group; the
arithmetic is done in the type of the state and checks nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory.observation import Observation
from ldm_jax.memory.products import combine, outer
from ldm_jax.typing import DType, Key, Scalar, ScalarLike, Value


class Covariance(NamedTuple):
    """The inverse covariance of the keys, with forgetting kept beside it.

    `J_l / prod_{j<=l} lambda_j` is a ridge regression without forgetting whose weights are
    `w_i = beta_i / prod_{j<=i} lambda_j`. So a write is a write with forgetting 1 and importance `w`: it leaves the
    same `M`, and `P` times the product of forgetting. Nothing is divided by lambda, and `P` does not grow.
    """

    matrix: Float[Array, "*batch K K"]
    """`discount * P`; for the square root a factor `S` of it, `S S' = discount * P`."""
    discount: Float[Array, "*batch"]
    """The product of forgetting so far, times what `rebase` multiplied it by."""


class MemoryState(NamedTuple):
    """What a write updates, float32 in a model whatever the compute type."""

    memory: Float[Array, "*batch K V"]
    """`M'`."""
    covariance: Covariance | None
    """None for the writes without one."""


class FactorGain(NamedTuple):
    """What the square root needs beside `u` and `g`: `S <- S - step u f'`."""

    key: Float[Array, "*batch K"]
    """`f = S'k`."""
    step: Float[Array, "*batch"]
    """`w / (s + sqrt(s))`."""


class Gain(NamedTuple):
    """How an observation moves a regression's state: `M' <- M' + g u e'` and `P <- P - g u u'`."""

    direction: Float[Array, "*batch K"]
    """`u = P k`."""
    size: Float[Array, "*batch"]
    """`g = w / s` with `s = 1 + w k'u`."""
    discount: Float[Array, "*batch"]
    """The covariance's, before the write."""
    factor: FactorGain | None = None
    """Of the square root."""


class Residual(NamedTuple):
    """What undoing a regression's write needs beside the later state."""

    error: Float[Array, "*batch V"]
    """`e = v - M k`."""
    gain: Gain


class CovarianceRule(NamedTuple):
    """The part of a regression's write that concerns the keys alone."""

    start: Callable[[int, ScalarLike, DType], Covariance]
    """`(key_dim, alpha, dtype) -> covariance` before the first observation."""
    gain: Callable[[Covariance, Observation], Gain]
    """How an observation moves the state."""
    advance: Callable[[Covariance, Gain, Scalar], Covariance]
    """`(covariance, gain, forgetting) -> covariance` after the observation."""
    retreat: Callable[[Covariance, Gain], Covariance]
    """The covariance before the observation, from that after it."""
    project: Callable[[Covariance, Key], Key]
    """`P q`."""


class WriteRule(NamedTuple):
    """One kind of write."""

    start: Callable[[int, int, ScalarLike, DType], MemoryState]
    """`(value_dim, key_dim, alpha, dtype) -> state` before the first observation."""
    write: Callable[[MemoryState, Observation], tuple[MemoryState, Residual | None]]
    """The state after an observation, and what undoing it needs."""
    undo: Callable[[MemoryState, Residual], MemoryState] | None = None
    """The state before a write, from that after it; None where it would divide `M` by forgetting."""
    covariance: CovarianceRule | None = None
    """Of the regressions."""


def start_without_covariance(value_dim: int, key_dim: int, alpha: ScalarLike, dtype: DType) -> MemoryState:
    """`M = 0`; these writes have no ridge."""
    del alpha
    return MemoryState(jnp.zeros((key_dim, value_dim), dtype), None)


def read(state: MemoryState, query: Key) -> Value:
    """`M q`."""
    return combine(query, state.memory)


def regression_rule(rule: CovarianceRule) -> WriteRule:
    """The write of a regression: `e = v - M k`, `M' <- M' + g u e'`, and the covariance by its own rule."""

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
    """`M' - g u e'`: what `add_error` was given."""
    return memory - outer(gain.size * gain.direction, error)


SMALLEST_DISCOUNT = 2.0**-20


def rebase(discount: Scalar) -> Scalar:
    """A power of two `r`: 2^10 where the discount is below 2^-20, else 1.

    Multiplying `P` and the discount by `r^2` changes no digit of either and nothing of the regression; it keeps the
    product of forgetting, and the weights `beta / discount`, in the range of float32 at any depth, for forgetting of at
    least 1e-6.
    """
    return jnp.where(jax.lax.stop_gradient(discount) < SMALLEST_DISCOUNT, 2.0**10, 1.0).astype(discount.dtype)
