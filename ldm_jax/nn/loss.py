"""The cross-entropy over a large vocabulary, computed in chunks of tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ldm_jax.sharding import Axis, constrain, parts
from ldm_jax.typing import Hidden, Tokens


class TokenLosses(NamedTuple):
    """The losses of every target, float32."""

    cross_entropy: Float[Array, "*tokens"]
    """`-log softmax(logits)[target]`, in nats."""
    log_normaliser: Float[Array, "*tokens"]
    """`log sum exp(logits)`, for the z-loss (Chowdhery et al., arXiv 2204.02311)."""


def chunked_cross_entropy(
    hidden: Hidden,
    targets: Tokens,
    logits: Callable[[Float[Array, "B chunk D"]], Float[Array, "B chunk S"]],
    chunk: int,
) -> TokenLosses:
    """The losses of every token `[B, T]`.

    A device holds the logits of at most `chunk` tokens at a time (or of one token per row, if that is more), in the
    forward and in the backward pass, which computes them again. Rows are padded to a multiple of the chunk's length.

    Args:
        hidden: the head's input, `[B, T, D]`.
        targets: `[B, T]`, in `[0, S)`.
        logits: the head, a function of the hidden states of any number of tokens.
        chunk: tokens per device and chunk, at least 1.
    """
    batch, length = targets.shape
    if not targets.size:
        return TokenLosses(*(jnp.zeros(targets.shape, jnp.float32) for _ in TokenLosses._fields))
    at_a_time = chunk * parts(targets.shape, Axis.BATCH, Axis.TOKENS)
    chunks = -(-length // max(1, at_a_time // batch))
    own = -(-length // chunks)  # tokens of a chunk in each row
    padding = -length % own
    # Chunk i of n consists of tokens i, i + n, i + 2n, ... of each row, so that every device has a part of every chunk.
    inputs = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(batch, own, -1, hidden.shape[-1])
    labels = jnp.pad(targets, ((0, 0), (0, padding))).reshape(batch, own, -1)

    @jax.checkpoint
    def chunk_losses(h: Float[Array, "B chunk D"], label: Int[Array, "B chunk"]) -> TokenLosses:
        scores = logits(constrain(h, Axis.BATCH, Axis.TOKENS, None)).astype(jnp.float32)
        scores = constrain(scores, Axis.BATCH, Axis.TOKENS, Axis.VOCABULARY)
        log_normaliser = jax.nn.logsumexp(scores, axis=-1)
        own_score = jnp.sum(jnp.where(label[..., None] == jnp.arange(scores.shape[-1]), scores, 0), axis=-1)
        return TokenLosses(log_normaliser - own_score, log_normaliser)

    if inputs.shape[2] == 1:
        losses = chunk_losses(inputs[:, :, 0], labels[:, :, 0])
    else:
        by_chunk = jnp.moveaxis(inputs, 2, 0), jnp.moveaxis(labels, 2, 0)
        losses = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), jax.lax.map(lambda part: chunk_losses(*part), by_chunk))
    return TokenLosses(*(part.reshape(batch, -1)[:, :length] for part in losses))


def target_weights(
    tokens: Int[Array, "B T_and_next"], segments: Int[Array, "B T_and_next"] | None
) -> Float[Array, "B T"]:
    """1 for every target, except 0 for a target in another segment than the token before it."""
    if segments is None:
        return jnp.ones(tokens[:, 1:].shape, jnp.float32)
    return (segments[:, 1:] == segments[:, :-1]).astype(jnp.float32)
