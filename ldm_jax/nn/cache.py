"""Keys and values of the tokens before, for decoding. The depth memory is per token and adds nothing to them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.config import ModelConfig


class KeyValues(NamedTuple):
    """Of the latest tokens; the token at place p is in column `p mod W`. Keys are rotated to their places."""

    key: Float[Array, "*depth B W J C"]
    value: Float[Array, "*depth B W J C"]


class Cache(NamedTuple):
    """What decoding carries from token to token. Sequences of different lengths end at one place: they begin later."""

    layers: KeyValues
    """With a leading axis over blocks; in the compute type."""
    start: Int[Array, " B"]
    """Place of each sequence's first token. What lies before it is padding."""
    length: Int[Array, ""]
    """Places filled so far, padding included."""

    @property
    def window(self) -> int:
        """W: places held, and so how far back a token sees, itself included."""
        return self.layers.key.shape[-3]


class Places(NamedTuple):
    """Where new tokens stand among those that the cache holds."""

    columns: Int[Array, " T"]
    """That their keys and values are written into."""
    positions: Int[Array, "B T"]
    """In their sequences, counted from 0; padding has 0."""
    visible: Bool[Array, "B T W"]
    """Whether a token sees a column, once all new tokens are written."""


def init_cache(config: ModelConfig, start: Int[Array, " B"], window: int) -> Cache:
    """An empty cache for sequences that begin at the places `start`, of which a token sees the last `window`."""
    shape = (config.depth, start.shape[0], window, config.kv_heads_or_heads, config.head_dim)
    empty = KeyValues(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))  # two arrays: they are donated
    return Cache(empty, start, jnp.zeros((), jnp.int32))


def next_places(cache: Cache, count: int) -> Places:
    """The places of the next `count` tokens.

    A new token overwrites the one W places before it. So several at once must fit into what is still empty, or the
    first of them would miss what the last overwrote; one at a time always fits.
    """
    window = cache.window
    new = cache.length + jnp.arange(count)
    last = new[-1]
    held = last - (last - jnp.arange(window)) % window  # the place that each column holds; negative: none yet
    start = cache.start[:, None, None]
    visible = (held >= start) & (held <= new[:, None])
    positions = jnp.maximum(new - cache.start[:, None], 0)
    return Places(new % window, positions, visible)


def write_key_values(cache: KeyValues, new: KeyValues, places: Places) -> KeyValues:
    """One layer's cache with the new tokens' keys and values `[B, T, J, C]` in their columns."""
    return jax.tree.map(lambda old, x: old.at[:, places.columns].set(x.astype(old.dtype)), cache, new)
