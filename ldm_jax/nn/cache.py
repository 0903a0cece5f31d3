"""The key-value cache for decoding. Depth mixers are per token, so they add nothing to the cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.config import ModelConfig


class KeyValues(NamedTuple):
    """Keys and values of the latest tokens. The token at place p is in slot `p mod W`. Keys are rotated."""

    key: Float[Array, "*depth B W J C"]
    value: Float[Array, "*depth B W J C"]


class Cache(NamedTuple):
    """The state of decoding. Sequences of different lengths are padded at their start, so that they end together.

    A place is an index into the padded sequences.
    """

    layers: KeyValues
    """Keys and values, with a leading axis over blocks, in the compute type."""
    start: Int[Array, " B"]
    """The place of each sequence's first token. Earlier places are padding."""
    length: Int[Array, ""]
    """The number of places written so far, padding included."""

    @property
    def window(self) -> int:
        """W: the number of slots. A token attends to the last W places, its own included."""
        return self.layers.key.shape[-3]


class Places(NamedTuple):
    """The slots, positions and mask of new tokens."""

    slots: Int[Array, " T"]
    """The slots to which the keys and values are written."""
    positions: Int[Array, "B T"]
    """The positions in the sequences, counted from 0; 0 for padding."""
    visible: Bool[Array, "B T W"]
    """Whether a token attends to a slot, after all new tokens are written."""


def init_cache(config: ModelConfig, start: Int[Array, " B"], window: int) -> Cache:
    """An empty cache with `window` slots, for sequences whose first tokens are at the places `start`."""
    shape = (config.depth, start.shape[0], window, config.kv_heads_or_heads, config.head_dim_or_default)
    empty = KeyValues(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))  # two buffers, for donation
    return Cache(empty, start, jnp.zeros((), jnp.int32))


def next_places(cache: Cache, count: int) -> Places:
    """The slots, positions and mask of the next `count` tokens.

    A new token overwrites the one W places before it. One token at a time is always possible. Several tokens at a time
    must fit into the empty slots; otherwise the last would overwrite slots that the first attend to.
    """
    window = cache.window
    new = cache.length + jnp.arange(count)
    last = new[-1]
    held = last - (last - jnp.arange(window)) % window  # the place in each slot; negative: the slot is empty
    start = cache.start[:, None, None]
    visible = (held >= start) & (held <= new[:, None])
    positions = jnp.maximum(new - cache.start[:, None], 0)
    return Places(new % window, positions, visible)


def write_key_values(cache: KeyValues, new: KeyValues, places: Places) -> KeyValues:
    """Writes the keys and values `[B, T, J, C]` of new tokens to the cache of one layer."""
    return jax.tree.map(lambda old, x: old.at[:, places.slots].set(x.astype(old.dtype)), cache, new)
