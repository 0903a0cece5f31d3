"""Rotary position embedding (Su et al., arXiv 2104.09864). The halves of a head are rotated against each other."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "B T H C"],
    base: float,
    positions: Int[Array, "#B T"] | None = None,
    scaling: tuple[float, ...] | None = None,
) -> Float[Array, "B T H C"]:
    """Rotates the pair `(x_c, x_{c + C/2})` at position `t` by `t * base^(-2c/C)` radians.

    The dot product of two rotated vectors depends only on the distance of their positions. Angles are float32; the
    result has the type of `x`. C must be even. The default positions are 0, 1, 2, ...
    With `scaling`, the frequencies are those of `scale_frequencies`.
    """
    if positions is None:
        positions = jnp.arange(x.shape[1])[None]
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, *scaling)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies  # [B, T, C/2]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def scale_frequencies(
    frequencies: Float[Array, " half"], factor: float, low: float, high: float, context: float
) -> Float[Array, " half"]:
    """Llama 3's scaling, by how often a frequency turns within `context` tokens.

    A frequency with more than `high` turns stays, one with less than `low` turns is divided by `factor`, and those
    between are interpolated linearly in the number of turns.
    """
    turns = frequencies * context / (2 * jnp.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)
