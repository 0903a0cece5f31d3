"""A depth memory with what it learns: reader, writer and forgetting. Its mathematics is in `ldm_jax.memory`.

The memory is per token. Nothing here looks from one token to another, so causality is untouched.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax import memory
from ldm_jax.typing import DType


class Write(enum.StrEnum):
    """How an observation enters the memory."""

    RLS = "rls"
    SQRT_RLS = "sqrt_rls"
    ADDITIVE = "additive"
    DELTA = "delta"


WRITES = {
    Write.RLS: (memory.rls_write, memory.init_state),
    Write.SQRT_RLS: (memory.sqrt_rls_write, memory.sqrt_init_state),
    Write.ADDITIVE: (memory.additive_write, memory.init_state),
    Write.DELTA: (memory.delta_write, memory.init_state),
}

FORGETTING_START = 4.0  # theta; sigmoid(4) = .982


@dataclass(frozen=True)
class DepthMemoryConfig:
    """A depth memory's options."""

    groups: int = 4
    """G: the groups that the width is split into; each has its own memory, forgetting, gates and gain."""
    key_dim: int = 4
    """K: width of keys and queries. The state is K times as wide as the stream."""
    latent_dim: int = 32
    """R: width of the latent that keys and importance, or queries and gates, are computed from."""
    alpha: float = 10.0
    """One over the ridge of the regression."""
    forgetting_floor: float | None = None
    """What forgetting cannot fall below. None: 1e-3 ** (1 / sublayers), so that the ridge keeps 1e-3 of its weight."""
    unit_keys: bool = True
    """Scale keys and queries to unit length."""
    shared_key: bool = False
    """One key for all groups instead of one for each."""
    initial_gain: float = 2.0
    """The read's gain at the start. The read gate starts at one half."""
    write: Write = Write.RLS
    """How an observation enters the memory."""

    def __post_init__(self) -> None:
        for name in ("groups", "key_dim", "latent_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}, but it must be positive and finite.")
        if self.forgetting_floor is not None and not 0 < self.forgetting_floor <= 1:
            raise ValueError(f"forgetting_floor is {self.forgetting_floor}, but it must lie in (0, 1].")
        if self.write is Write.DELTA and not self.unit_keys:
            raise ValueError("write is delta, which diverges on long keys, but unit_keys is false: set it to true.")


class MemoryState(NamedTuple):
    """`(M, P)` of every token and group, in float32 whatever the compute type."""

    memory: Float[Array, "*tokens G V K"]
    inverse_covariance: Float[Array, "*tokens G K K"]
    """P; for the square root its factor S."""


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

    def __call__(self, state: MemoryState, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """The readout for a context `h`, concatenated over the groups, in the context's type."""
        check_memory(state, context, self.config)
        latent = self.latent(self.norm(context)).astype(jnp.float32)
        query = _keys(self.query(latent), self.config.groups, self.config)
        scale = self.gain[...] * jax.nn.sigmoid(self.gate(latent))
        values = _over(memory.rls_read, state.memory.ndim - 2)(state.memory, query)
        return (scale[..., None] * values).reshape(context.shape).astype(context.dtype)


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

    def __call__(
        self, state: MemoryState, output: Float[Array, "*tokens D"], forgetting: Float[Array, " G"]
    ) -> MemoryState:
        """The state that has the output written into it."""
        config = self.config
        check_memory(state, output, config)
        latent = self.latent(output).astype(jnp.float32)
        keys = _keys(self.key(latent), 1 if config.shared_key else config.groups, config)
        bound = jax.nn.sigmoid if config.write is Write.DELTA else jax.nn.softplus
        observation = memory.Observation(
            key=jnp.broadcast_to(keys, (*output.shape[:-1], config.groups, config.key_dim)),
            value=output.reshape(*output.shape[:-1], config.groups, -1),
            forgetting=jnp.broadcast_to(forgetting, (*output.shape[:-1], config.groups)),
            importance=bound(self.importance(latent)),
        )
        write, _ = WRITES[config.write]
        return MemoryState(*_over(write, output.ndim)(*state, observation))


class DepthMemory(nnx.Module):
    """One layer's reader, writer and forgetting, to be added to any flax model; the state is passed by hand.

        self.memory = DepthMemory(width, sublayers, rngs=rngs)          # in each layer
        x = h + self.memory.read(state, h)                              # what the layer is given
        state = self.memory.write(state, output)                        # what the layer has made of it

    The first state comes from `init_memory`. `sublayers` is how many writes a token will see: the default floor of
    forgetting depends on it.

    Raises:
        ValueError: a width that the groups do not divide.
    """

    def __init__(
        self,
        width: int,
        sublayers: int,
        config: DepthMemoryConfig = DepthMemoryConfig(),
        *,
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_width(width, config)
        floor = 1e-3 ** (1 / sublayers) if config.forgetting_floor is None else config.forgetting_floor
        self.reader = Reader(width, config, dtype=dtype, rngs=rngs)
        self.writer = Writer(width, config, dtype=dtype, rngs=rngs)
        self.forgetting = Forgetting(config.groups, floor)

    def read(self, state: MemoryState, context: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """`gain_g * gate_g * M_g q_g` over the groups, query and gate computed from the context `h`."""
        return self.reader(state, context)

    def write(self, state: MemoryState, output: Float[Array, "*tokens D"]) -> MemoryState:
        """The state after the observation of an output, whose key and importance are computed from it."""
        return self.writer(state, output, self.forgetting())


def init_memory(tokens: tuple[int, ...], width: int, config: DepthMemoryConfig = DepthMemoryConfig()) -> MemoryState:
    """The state before the first write, for an array of tokens: `tokens` is `(B, T)`, or any other leading shape.

    Raises:
        ValueError: a width that the groups do not divide.
    """
    check_width(width, config)
    _, init = WRITES[config.write]
    state = init(width // config.groups, config.key_dim, config.alpha)
    return MemoryState(*(jnp.broadcast_to(part, (*tokens, config.groups, *part.shape)) for part in state))


def check_width(width: int, config: DepthMemoryConfig) -> None:
    """Raises ValueError unless the groups divide the width."""
    if width % config.groups:
        raise ValueError(f"groups is {config.groups}, which does not divide the width {width}.")


def check_memory(state: MemoryState, x: Float[Array, "*tokens D"], config: DepthMemoryConfig) -> None:
    """Raises ValueError unless the state is the one of these tokens, this width and these options."""
    expected = (*x.shape[:-1], config.groups, x.shape[-1] // config.groups, config.key_dim)
    if state.memory.shape != expected:
        raise ValueError(
            f"the memory has shape {state.memory.shape}, but for tokens {x.shape[:-1]} of width {x.shape[-1]} it must "
            f"have {expected}: start it with init_memory(h.shape[:-1], width, config), the config of the DepthMemory."
        )


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


def _over(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """`jax.vmap` over that many leading axes."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function
