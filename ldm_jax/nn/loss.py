"""The loss over a large vocabulary, a chunk of tokens at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ldm_jax.typing import Hidden, Tokens


def chunked_cross_entropy(
    hidden: Hidden,
    targets: Tokens,
    logits: Callable[[Float[Array, "chunk D"]], Float[Array, "chunk S"]],
    chunk: int,
) -> Float[Array, "B T"]:
    """`-log softmax(logits(h_t))[target_t]` of every token, in nats, float32.

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
    def chunk_losses(h: Float[Array, "chunk D"], label: Int[Array, " chunk"]) -> Float[Array, " chunk"]:
        scores = logits(h).astype(jnp.float32)
        return optax.losses.softmax_cross_entropy_with_integer_labels(scores, label)

    if flat.shape[0] == 1:
        losses = chunk_losses(flat[0], labels[0])
    else:
        losses = jax.lax.map(lambda part: chunk_losses(*part), (flat, labels))
    return losses.reshape(-1)[:tokens].reshape(targets.shape)
