"""Whether a loss is far above those before it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ldm_jax.typing import Scalar

MEMORY = 0.99
"""Decay of the running mean, so that it spans about the last hundred losses."""
FEWEST = 100
"""Losses before any is called a spike: the first ones fall fast."""


class LossRecord(NamedTuple):
    """Running mean and variance of the losses whose updates were made."""

    mean: Scalar
    variance: Scalar
    losses: Int[Array, ""]

    @classmethod
    def empty(cls) -> "LossRecord":
        """Of no loss."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))


def record(past: LossRecord, loss: Scalar) -> LossRecord:
    """The record with one loss more (West's update of an exponentially weighted variance)."""
    decay = jnp.minimum(MEMORY, past.losses / (past.losses + 1))  # a plain mean at first
    difference = loss - past.mean
    mean = past.mean + (1 - decay) * difference
    variance = decay * (past.variance + (1 - decay) * difference**2)
    return LossRecord(mean, variance, past.losses + 1)


def is_spike(past: LossRecord, loss: Scalar, deviations: float | None) -> Bool[Array, ""]:
    """Whether the loss is more than so many standard deviations above the mean. None, or few losses: it is not."""
    if deviations is None:
        return jnp.zeros((), bool)
    bound = past.mean + deviations * jnp.sqrt(past.variance)
    return (past.losses >= FEWEST) & (loss > bound)
