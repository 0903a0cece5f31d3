"""The loss over a large vocabulary, a chunk of tokens at a time."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ldm_jax.typing import Hidden, Tokens


class TokenLosses(NamedTuple):
    """Of every target, float32."""

    cross_entropy: Float[Array, "*tokens"]
    """`-log softmax(logits)[target]`, in nats."""
    log_normaliser: Float[Array, "*tokens"]
    """`log sum exp(logits)`, whose square a z-loss keeps small (Chowdhery et al., arXiv 2204.02311)."""


def chunked_cross_entropy(
    hidden: Hidden,
    targets: Tokens,
    logits: Callable[[Float[Array, "chunk D"]], Float[Array, "chunk S"]],
    chunk: int,
) -> TokenLosses:
    """The losses of every token `[B, T]`.

    Logits exist for `chunk` tokens at a time, forward and backward: they are recomputed, not saved. If `chunk` does
    not divide the number of tokens, the last chunk is filled up with tokens that are thrown away.

    Args:
        hidden: what the head is given, `[B, T, D]`.
        targets: `[B, T]`, in `[0, S)`.
        logits: the head, of any number of tokens.
        chunk: tokens, at least 1.
    """
    tokens = targets.size
    chunk = min(chunk, tokens)
    padding = -tokens % chunk
    flat = jnp.pad(hidden.reshape(tokens, -1), ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    labels = jnp.pad(targets.reshape(tokens), (0, padding)).reshape(-1, chunk)

    @jax.checkpoint
    def chunk_losses(h: Float[Array, "chunk D"], label: Int[Array, " chunk"]) -> TokenLosses:
        scores = logits(h).astype(jnp.float32)
        log_normaliser = jax.nn.logsumexp(scores, axis=-1)
        return TokenLosses(log_normaliser - jnp.take_along_axis(scores, label[:, None], axis=-1)[:, 0], log_normaliser)

    if flat.shape[0] == 1:
        losses = chunk_losses(flat[0], labels[0])
    else:
        losses = jax.lax.map(lambda part: chunk_losses(*part), (flat, labels))
    return TokenLosses(*(part.reshape(-1)[:tokens].reshape(targets.shape) for part in losses))


def target_weights(
    tokens: Int[Array, "B T_and_next"], segments: Int[Array, "B T_and_next"] | None
) -> Float[Array, "B T"]:
    """1 for every target that counts: not for one in another segment than the token before it."""
    if segments is None:
        return jnp.ones(tokens[:, 1:].shape, jnp.float32)
    return (segments[:, 1:] == segments[:, :-1]).astype(jnp.float32)
