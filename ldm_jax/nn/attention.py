"""Causal self-attention with rotary position embedding, grouped queries and, optionally, QK-norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.config import AttentionBias, AttentionImplementation, ModelConfig
from ldm_jax.nn.cache import KeyValues, Places, write_key_values
from ldm_jax.nn.initializers import branch_output, rms_norm
from ldm_jax.nn.rope import rotate
from ldm_jax.nn.softmax_attention import cudnn_attention, flash_attention, plain_attention
from ldm_jax.parameters import linear
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import Hidden


class Documents(NamedTuple):
    """The documents packed into a window. A token attends to tokens of its own document only."""

    positions: Int[Array, "B T"]
    """The position of each token in its document, counted from 0."""
    segments: Int[Array, "B T"]
    """The number of each token's document."""


def make_documents(segments: Int[Array, "B T"]) -> Documents:
    """The documents of a window, from the number of each token's document. Documents must be contiguous."""
    place = jnp.arange(segments.shape[1])
    first = jnp.concatenate([jnp.full_like(segments[:, :1], True), segments[:, 1:] != segments[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(first.astype(bool), place, 0), axis=1)
    return Documents(place - start, segments)


class Attention(nnx.Module):
    """`softmax(q k' / sqrt(C) + causal mask) v` over H query heads that share J key-value heads."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, head_dim, dtype = config.width, config.head_dim_or_default, config.dtype
        axes, bias = (Axis.WIDTH, Axis.HEADS), config.attention_bias is not None
        kv_width = config.kv_heads_or_heads * head_dim
        self.query = linear(width, config.heads * head_dim, axes, use_bias=bias, dtype=dtype, rngs=rngs)
        self.key = linear(width, kv_width, axes, use_bias=bias, dtype=dtype, rngs=rngs)
        self.value = linear(width, kv_width, axes, use_bias=bias, dtype=dtype, rngs=rngs)
        out_bias = config.attention_bias is AttentionBias.ALL
        self.out = branch_output(config.heads * head_dim, Axis.HEADS, config, rngs, use_bias=out_bias)
        self.query_norm = rms_norm(head_dim, config, rngs) if config.qk_norm else None
        self.key_norm = rms_norm(head_dim, config, rngs) if config.qk_norm else None

    def __call__(self, x: Hidden, documents: Documents | None = None) -> Hidden:
        """The attention output `[B, T, D]`. Position t attends to positions up to t, within its document if given."""
        query, key, value = self._project(x, None if documents is None else documents.positions)
        segments = None if documents is None else documents.segments
        match self.config.attention:
            case AttentionImplementation.LOCAL:
                mixed = self._local(query, key, value)
            case AttentionImplementation.XLA:
                mixed = plain_attention(query, key, value, segments)
            case AttentionImplementation.CUDNN:
                mixed = cudnn_attention(query, key, value, segments)
            case AttentionImplementation.FLASH:
                mixed = flash_attention(query, key, value, segments)
        return self._merge(mixed)

    def decode(self, x: Hidden, cache: KeyValues, places: Places) -> tuple[Hidden, KeyValues]:
        """The attention output for new tokens `[B, T, D]`, which attend to the cache, and the updated cache."""
        query, key, value = self._project(x, places.positions)
        cache = write_key_values(cache, KeyValues(key, value), places)
        if self.config.attention is AttentionImplementation.LOCAL:
            return self._merge(self._local(query, key, value)), cache
        # There are few queries, so materialising the scores is cheap: cuDNN is used only if selected by name.
        cudnn = self.config.attention is AttentionImplementation.CUDNN
        mixed = jax.nn.dot_product_attention(
            query, cache.key, cache.value, mask=places.visible[:, None], implementation="cudnn" if cudnn else "xla"
        )
        return self._merge(mixed), cache

    def _project(
        self, x: Hidden, positions: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T H C"], Float[Array, "B T J C"], Float[Array, "B T J C"]]:
        config = self.config
        heads = config.heads, config.kv_heads_or_heads, config.kv_heads_or_heads
        query, key, value = (
            project(x).reshape(*x.shape[:-1], count, config.head_dim_or_default)
            for project, count in zip((self.query, self.key, self.value), heads, strict=True)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (rotate(x, config.rope_base, positions, config.rope_scaling) for x in (query, key))
        # Keys and values of the whole window are gathered if tokens are sharded, because every query attends to them.
        key, value = (constrain(x, Axis.BATCH, None, Axis.HEADS, None) for x in (key, value))
        return constrain(query, Axis.BATCH, Axis.TOKENS, Axis.HEADS, None), key, value

    def _merge(self, mixed: Float[Array, "B T H C"]) -> Hidden:
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    def _local(
        self, query: Float[Array, "B T H C"], key: Float[Array, "B T J C"], value: Float[Array, "B T J C"]
    ) -> Float[Array, "B T H C"]:
        """A stand-in for attention that does not mix tokens."""
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        score = jnp.sum(query * key, axis=-1, keepdims=True) * query.shape[-1] ** -0.5
        return value * jax.nn.sigmoid(score)
