"""The training state, as it is saved."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from ldm_jax.nn import Params, replace_params
from ldm_jax.typing import Scalar


class LossRecord(NamedTuple):
    """Running mean and variance of the losses of all updates that were applied."""

    mean: Scalar
    variance: Scalar
    losses: Int[Array, ""]

    @classmethod
    def empty(cls) -> "LossRecord":
        """The record of no loss."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


class Skips(NamedTuple):
    """Updates that were skipped, because the loss or the gradient was not finite, or the loss was a spike.

    A batch without targets has no update and is not counted.
    """

    total: Int[Array, ""]
    in_a_row: Int[Array, ""]


class TrainState(NamedTuple):
    """Everything that a training step changes, as a pytree of arrays."""

    step: Int[Array, ""]
    """Batches seen, including those whose updates were skipped."""
    params: Params
    """Nested dictionaries of float32 arrays."""
    optimizer: optax.OptState
    skips: Skips
    losses: LossRecord
    average: Params | None
    """Exponential moving average of the trained parameters; None unless `optimizer.ema` is set."""

    @classmethod
    def imported(cls, params: Params) -> "TrainState":
        """The state of an imported model, for a checkpoint: what is None starts as in a new run."""
        absent: Any = None
        return cls(jnp.zeros((), jnp.int32), params, absent, absent, absent, None)

    @property
    def eval_params(self) -> Params:
        """The parameters to evaluate: their moving average if there is one."""
        return self.params if self.average is None else replace_params(self.params, self.average)
