"""Causal self-attention with rotary positions, grouped queries, and normalised queries and keys if asked for."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.config import AttentionImplementation, ModelConfig
from ldm_jax.nn.initializers import branch_output
from ldm_jax.nn.rope import rotate
from ldm_jax.typing import Hidden


class Attention(nnx.Module):
    """`softmax(q k' / sqrt(C) + causal mask) v` over H query heads that share J key-value heads."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, head_dim, dtype = config.width, config.head_dim, config.dtype
        self.query = nnx.Linear(width, config.heads * head_dim, use_bias=False, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(width, config.kv_heads_or_heads * head_dim, use_bias=False, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(width, config.kv_heads_or_heads * head_dim, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = branch_output(config.heads * head_dim, width, config, rngs)
        norm = nnx.RMSNorm if config.qk_norm else None
        self.query_norm = norm(head_dim, dtype=dtype, rngs=rngs) if norm else None
        self.key_norm = norm(head_dim, dtype=dtype, rngs=rngs) if norm else None

    def __call__(self, x: Hidden) -> Hidden:
        """The attention's output `[B, T, D]`; position t sees positions up to t."""
        config = self.config
        query, key, value = (
            project(x).reshape(*x.shape[:-1], -1, config.head_dim) for project in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, config.rope_base), rotate(key, config.rope_base)
        mixed = self._mix(query, key, value)
        return self.out(mixed.reshape(*x.shape[:-1], -1))

    def _mix(
        self, query: Float[Array, "B T H C"], key: Float[Array, "B T J C"], value: Float[Array, "B T J C"]
    ) -> Float[Array, "B T H C"]:
        match self.config.attention:
            case AttentionImplementation.LOCAL:
                key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
                score = jnp.sum(query * key, axis=-1, keepdims=True) * self.config.head_dim**-0.5
                return value * jax.nn.sigmoid(score)
            case implementation:
                return jax.nn.dot_product_attention(
                    query, key, value, is_causal=True, implementation=implementation.value
                )
