"""What a layer learns to ask of a depth memory, to tell it, and to forget."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.memory import Observation
from ldm_jax.mixers.depth_memory_config import DepthMemoryConfig, Write
from ldm_jax.mixers.memory_form import AnyState, check_memory, make_form
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import DType

FORGETTING_START = 4.0  # theta; sigmoid(4) = .982


class Forgetting(nnx.Module):
    """`lambda = floor + (1 - floor) sigmoid(theta)`, `[G]`, float32, near 1 at the start."""

    def __init__(self, groups: int, floor: float):
        self.floor = floor
        self.theta = nnx.Param(jnp.full((groups,), FORGETTING_START, jnp.float32))

    def __call__(self) -> Float[Array, " G"]:
        """Forgetting of every group."""
        return self.floor + (1 - self.floor) * jax.nn.sigmoid(self.theta[...])


class Reader(nnx.Module):
    """Asks the memory: `gain_g * gate_g * M_g q_g`, the query and the gate from a latent `z = W n(h) + b` `[R]`.

    `n` is RMSNorm without a scale of its own. The query has unit length if the config says so; `gate = sigmoid(.)`.
    The latent's product is in the compute type; from the latent on, all is float32.
    """

    def __init__(self, width: int, config: DepthMemoryConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.norm = nnx.RMSNorm(width, use_scale=False, dtype=dtype, rngs=rngs)
        self.latent = _latent(width, config.latent_dim, dtype, rngs)
        self.query = nnx.Linear(config.latent_dim, config.groups * config.key_dim, use_bias=False, rngs=rngs)
        self.gate = _gate(config.latent_dim, config.groups, 0.0, rngs)
        self.gain = nnx.Param(jnp.full((config.groups,), config.initial_gain, jnp.float32))

    def __call__(self, state: AnyState, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """The readout for a context `h`, concatenated over the groups, in the context's type."""
        check_memory(state, context, self.config)
        query, scale = self.ask(context)
        values = make_form(self.config).read(state, query, context.shape[-1] // self.config.groups)
        return (scale[..., None] * values).reshape(context.shape).astype(context.dtype)

    def ask(self, context: Float[Array, "*tokens D"]) -> tuple[Float[Array, "*tokens G K"], Float[Array, "*tokens G"]]:
        """The query and the scale, gain times gate, of every group."""
        latent = self._latent(context)
        query = by_group(_keys(self.query(latent), self.config.groups, self.config))
        return query, self.gain[...] * jax.nn.sigmoid(self.gate(latent))

    def gates(self, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens G"]:
        """The read gate of every group."""
        return jax.nn.sigmoid(self.gate(self._latent(context)))

    def _latent(self, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens R"]:
        return self.latent(self.norm(context)).astype(jnp.float32)


class Writer(nnx.Module):
    """Tells the memory: the key and the importance of a sublayer's output, from a latent `z = W o + b` `[R]` of it.

    The key has unit length if the config says so. Importance is `softplus(.)`, 1 at the start; for the delta rule,
    whose importance is a step size, it is `sigmoid(.)`, .88 at the start. Types as in `Reader`.
    """

    def __init__(self, width: int, config: DepthMemoryConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.latent = _latent(width, config.latent_dim, dtype, rngs)
        keys = 1 if config.shared_key else config.groups
        self.key = nnx.Linear(config.latent_dim, keys * config.key_dim, use_bias=False, rngs=rngs)
        start = 2.0 if config.write is Write.DELTA else 0.5413248546129181  # softplus(.5413) = 1
        self.importance = _gate(config.latent_dim, config.groups, start, rngs)

    def __call__(self, output: Float[Array, "*tokens D"], forgetting: Float[Array, " G"]) -> Observation:
        """The observation of an output: key, value, forgetting and importance of every token and group."""
        config = self.config
        if output.ndim == 3:
            # Left to itself, jaxlib 0.10's partitioner goes from an output whose width lies over fsdp to groups that
            # lie over tensor by mixing up rows.
            output = constrain(output, Axis.BATCH, Axis.TOKENS, None)
        latent = self.latent(output).astype(jnp.float32)
        keys = _keys(self.key(latent), 1 if config.shared_key else config.groups, config)
        bound = jax.nn.sigmoid if config.write is Write.DELTA else jax.nn.softplus
        return Observation(
            key=by_group(jnp.broadcast_to(keys, (*output.shape[:-1], config.groups, config.key_dim))),
            value=by_group(output.reshape(*output.shape[:-1], config.groups, -1)),
            forgetting=jnp.broadcast_to(forgetting, (*output.shape[:-1], config.groups)),
            importance=bound(self.importance(latent)),
        )


def by_group(x: Float[Array, "*tokens G n"]) -> Float[Array, "*tokens G n"]:
    """The same, the groups laid out over the devices: from a write to a read, nothing goes from one to another."""
    return constrain(x, Axis.BATCH, Axis.TOKENS, Axis.GROUPS, None) if x.ndim == 4 else x


def _latent(width: int, latent_dim: int, dtype: DType, rngs: nnx.Rngs) -> nnx.Linear:
    # The bias is random, so that layers differ in their keys and queries from the first step on.
    return nnx.Linear(width, latent_dim, bias_init=nnx.initializers.normal(1.0), dtype=dtype, rngs=rngs)


def _gate(latent_dim: int, groups: int, start: float, rngs: nnx.Rngs) -> nnx.Linear:
    zeros, constant = nnx.initializers.zeros_init(), nnx.initializers.constant(start)
    return nnx.Linear(latent_dim, groups, kernel_init=zeros, bias_init=constant, rngs=rngs)


def _keys(flat: Float[Array, "*tokens GK"], groups: int, config: DepthMemoryConfig) -> Float[Array, "*tokens G K"]:
    """Keys or queries by group, of unit length if the config says so."""
    keys = flat.reshape(*flat.shape[:-1], groups, config.key_dim)
    if not config.unit_keys:
        return keys
    return keys * jax.lax.rsqrt(jnp.sum(keys**2, axis=-1, keepdims=True) + 1e-6)  # finite slope at 0
