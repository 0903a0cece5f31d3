"""The loss of a model on held-out text."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.nn import Transformer


class Evaluation(NamedTuple):
    """A mean over windows."""

    loss: float
    """Nats per token."""
    standard_error: float
    """Of the loss, from its spread over windows; nats per token."""

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits; a token is a byte."""
        return self.loss / math.log(2)


def make_evaluate(
    graph: nnx.GraphDef[Transformer], batch_size: int
) -> Callable[[object, Int[np.ndarray, "windows T_and_next"]], Evaluation]:
    """A function of the parameters and of windows `[windows, T + 1]`; it computes `batch_size` of them at a time."""

    @jax.jit
    def losses(params: object, windows: Int[Array, "b T_and_next"]) -> Float[Array, " b"]:
        return jnp.mean(nnx.merge(graph, params).token_losses(windows[:, :-1], windows[:, 1:]), axis=1)

    def evaluate(params: object, windows: Int[np.ndarray, "windows T_and_next"]) -> Evaluation:
        count = len(windows)
        size = min(batch_size, count)
        padded = np.concatenate([windows, np.repeat(windows[:1], -count % size, axis=0)])
        parts = [losses(params, jnp.asarray(part)) for part in padded.reshape(-1, size, padded.shape[1])]
        every = np.concatenate([np.asarray(part, np.float64) for part in parts])[:count]
        error = float(np.std(every, ddof=1) / math.sqrt(count)) if count > 1 else math.inf
        return Evaluation(float(np.mean(every)), error)

    return evaluate
