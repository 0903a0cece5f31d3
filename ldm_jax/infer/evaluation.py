"""The loss on held-out text."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.data import ValidationWindows
from ldm_jax.data.tokenizer import text_bytes
from ldm_jax.errors import UserError
from ldm_jax.infer.model import Model
from ldm_jax.infer.scoring import cut_windows, score_windows
from ldm_jax.nn import Transformer, target_weights
from ldm_jax.sharding import constrain

PIECES = 16
"""The standard error of the loss on a text with fewer windows is computed over this many pieces of it."""


class Evaluation(NamedTuple):
    """The mean loss over the targets of windows."""

    loss: float
    """Nats per token."""
    standard_error: float
    """Standard error of the loss over windows, in nats per token."""
    bits_per_byte: float
    """Bits of the tokens of text per byte of text: the ends of documents are left out of both."""
    windows: tuple[Float[np.ndarray, " windows"], Float[np.ndarray, " windows"]]
    """Summed loss and number of targets of each window, both multiplied by its weight."""

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, per token."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        """Loss, perplexity and bits per byte, with standard errors."""
        relative = self.standard_error / self.loss if self.loss else 0.0
        return (
            f"{self.loss:.4f} +- {self.standard_error:.4f} nats per token, perplexity {self.perplexity:.2f} +- "
            f"{self.perplexity * self.standard_error:.2f}, {self.bits_per_byte:.4f} +- "
            f"{self.bits_per_byte * relative:.4f} bits per byte"
        )

    def difference(self, other: "Evaluation") -> tuple[float, float]:
        """The loss minus that of another evaluation on the same windows, and the standard error of the difference."""
        (sums, targets), (other_sums, _) = self.windows, other.windows
        return _mean(sums - other_sums, targets)


def _mean(sums: Float[np.ndarray, " windows"], targets: Float[np.ndarray, " windows"]) -> tuple[float, float]:
    """The mean per target, and its standard error over windows. NaN without a target."""
    if not targets.any():
        return math.nan, math.nan
    mean, count = float(sums.sum() / targets.sum()), len(sums)
    spread = math.sqrt(np.sum((sums - mean * targets) ** 2) * count / (count - 1)) if count > 1 else math.inf
    return mean, spread / float(targets.sum())


def make_evaluate(
    graph: nnx.GraphDef[Transformer], batch_size: int, bytes_per_token: float = 1.0, end_of_document: int | None = None
) -> Callable[[object, ValidationWindows], Evaluation]:
    """A function that evaluates parameters on windows, `batch_size` at a time.

    `bytes_per_token` leaves out the tokens `end_of_document`; where that is None, all tokens are text.
    """

    @jax.jit
    def sums(
        params: object, tokens: Int[Array, "b T_and_next"], segments: Int[Array, "b T_and_next"] | None
    ) -> Float[Array, "4 b"]:
        input_segments = None if segments is None else segments[:, :-1]
        losses = nnx.merge(graph, params).token_losses(tokens[:, :-1], tokens[:, 1:], input_segments).cross_entropy
        weights = target_weights(tokens, segments)
        text = weights if end_of_document is None else jnp.where(tokens[:, 1:] == end_of_document, 0, weights)
        # Replicated, so that every process can read them.
        return constrain(jnp.sum(jnp.stack([weights * losses, weights, text * losses, text]), axis=2), None, None)

    def evaluate(params: object, validation: ValidationWindows) -> Evaluation:
        windows, weights = validation
        count = len(windows.tokens)
        size = min(batch_size, count)
        padding = -count % size
        padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], padding, axis=0)]), windows)
        parts = [
            sums(params, *jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + size]), padded))
            for start in range(0, count, size)
        ]
        losses, targets, text_losses, text = weights * np.concatenate(parts, axis=1).astype(np.float64)[:, :count]
        bits = _mean(text_losses, text)[0] / math.log(2)
        return Evaluation(*_mean(losses, targets), bits / bytes_per_token, (losses, targets))

    return evaluate


def evaluate_text(model: Model, texts: Iterable[str], batch_size: int) -> Evaluation:
    """Evaluates a model on all tokens of texts of any length.

    A text starts after `model.start`, or else an end-of-document token. Each of its tokens is a target once, as by
    lm-eval's `loglikelihood_rolling`. The ends of the texts are no targets.

    Raises:
        UserError: there is no text, or the tokenizer cannot encode it.
    """
    size, windows, context = 0, [], model.config.data.context
    before = model.start or (model.tokenizer.end_of_document,)
    for text in texts:
        windows += cut_windows(before, model.tokenizer.encode(text).tolist(), context)
        size += len(text_bytes(text))
    if not windows:
        raise UserError("the text is empty.")
    losses = [-scores.log_likelihoods.astype(np.float64) for scores in score_windows(model, windows, batch_size)]
    parts = -(-PIECES // len(losses))
    pieces = [piece for window in losses for piece in np.array_split(window, min(parts, len(window)))]
    sums, targets = np.array([piece.sum() for piece in pieces]), np.array([float(len(piece)) for piece in pieces])
    return Evaluation(*_mean(sums, targets), float(sums.sum()) / math.log(2) / size, (sums, targets))
