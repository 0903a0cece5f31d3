"""The loss of a model on held-out text."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.data import HeldOut
from ldm_jax.nn import Transformer, target_weights
from ldm_jax.sharding import constrain


class Evaluation(NamedTuple):
    """A mean over the targets of windows."""

    loss: float
    """Nats per token."""
    standard_error: float
    """Of the loss, from its spread over windows; nats per token."""
    bytes_per_token: float
    """Of the text, on average."""
    windows: tuple[Float[np.ndarray, " windows"], Float[np.ndarray, " windows"]]
    """Summed loss and number of targets of each, both times the window's weight."""

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits, by byte of text."""
        return self.loss / math.log(2) / self.bytes_per_token

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, by token."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        """All of it, with standard errors."""
        relative = self.standard_error / self.loss  # of what is proportional to the loss
        return (
            f"{self.loss:.4f} +- {self.standard_error:.4f} nats a token, perplexity {self.perplexity:.2f} +- "
            f"{self.perplexity * self.standard_error:.2f}, {self.bits_per_byte:.4f} +- "
            f"{self.bits_per_byte * relative:.4f} bits a byte"
        )

    def less(self, other: "Evaluation") -> tuple[float, float]:
        """The difference of the losses to another's on the same windows, and its standard error over windows."""
        (own, targets), (others, _) = self.windows, other.windows
        return _mean(own - others, targets)


def _mean(sums: Float[np.ndarray, " windows"], targets: Float[np.ndarray, " windows"]) -> tuple[float, float]:
    """The mean by target, and its standard error from the spread over windows."""
    mean, count = float(sums.sum() / targets.sum()), len(sums)
    spread = math.sqrt(np.sum((sums - mean * targets) ** 2) * count / (count - 1)) if count > 1 else math.inf
    return mean, spread / float(targets.sum())


def make_evaluate(
    graph: nnx.GraphDef[Transformer], batch_size: int, bytes_per_token: float = 1.0
) -> Callable[[object, HeldOut], Evaluation]:
    """A function of the parameters and of windows; it computes `batch_size` of them at a time."""

    @jax.jit
    def sums(
        params: object, tokens: Int[Array, "b T_and_next"], segments: Int[Array, "b T_and_next"] | None
    ) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
        inside = None if segments is None else segments[:, :-1]
        losses = nnx.merge(graph, params).token_losses(tokens[:, :-1], tokens[:, 1:], inside).cross_entropy
        weights = target_weights(tokens, segments)
        # Whole on every device, so that every process can read them.
        return constrain(jnp.sum(weights * losses, axis=1), None), constrain(jnp.sum(weights, axis=1), None)

    def evaluate(params: object, held_out: HeldOut) -> Evaluation:
        windows, weights = held_out
        count = len(windows.tokens)
        size = min(batch_size, count)
        padding = -count % size
        padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], padding, axis=0)]), windows)
        parts = [
            sums(params, *jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + size]), padded))
            for start in range(0, count, size)
        ]
        by_window = [np.concatenate(each).astype(np.float64)[:count] for each in zip(*parts, strict=True)]
        total, targets = (weights * each for each in by_window)
        return Evaluation(*_mean(total, targets), bytes_per_token, (total, targets))

    return evaluate
