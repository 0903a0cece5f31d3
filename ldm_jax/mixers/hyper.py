"""Hyper-Connections: several streams, from which every sublayer reads a sum and to which it writes in parts.

Source: Hyper-Connections, arXiv 2409.19606. Streams are `[B, T, E, D]`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.base import MixerState, at_least_float32
from ldm_jax.mixers.streams import StreamsLayer
from ldm_jax.options import check_option_types
from ldm_jax.typing import Hidden, Streams

Coefficients = tuple[Float[Array, "B T E"], Float[Array, "B T E"], Float[Array, "B T E E"]]
"""Of writing, reading and mixing."""


@dataclass(frozen=True)
class HyperConfig:
    """Options of the mixer hc."""

    streams: int = 4
    """E: streams of the model's width."""
    dynamic: bool = True
    """Coefficients depend on the token. Otherwise they are parameters."""

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}, but it must be at least 1.")


class HyperLayer(StreamsLayer):
    """`h = A_m' H;  H <- B f(h)' + A_r' H` for streams `H` `[E, D]`.

    Dynamic, with `X` the layer norm of every stream: `B = s_b tanh(X W_b) + b`, `A_m = s_a tanh(X W_m) + a_m`,
    `A_r = s_a tanh(X W_r) + a_r`. At the start `b = 1`, `a_m` takes stream `index mod E`, `a_r = I`, `W = 0`, and
    `s = .01`, which is PreLN. Coefficients are float32. The layer norm has a scale and a bias, as PyTorch's has.

    `index` is the sublayer's number, from 0.
    """

    def __init__(self, width: int, index: int | Array, config: HyperConfig, *, rngs: nnx.Rngs):
        streams = config.streams
        self.write_to = nnx.Param(jnp.ones((streams,), jnp.float32))
        self.read_from = nnx.Param((jnp.arange(streams) == index % streams).astype(jnp.float32))
        self.carry = nnx.Param(jnp.eye(streams, dtype=jnp.float32))
        self.dynamic = DynamicCoefficients(width, streams, rngs=rngs) if config.dynamic else None

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`A_m' H`; the state for `write` is `A_r' H` and `B`."""
        streams = state.stream
        write_to, read_from, carry = self.write_to[...], self.read_from[...], self.carry[...]
        if self.dynamic is not None:
            moved = self.dynamic(streams)
            write_to, read_from, carry = write_to + moved[0], read_from + moved[1], carry + moved[2]
        exact = at_least_float32(streams)
        x = jnp.einsum("...e,...ed->...d", read_from, exact)
        carried = jnp.einsum("...ij,...id->...jd", carry, exact)
        return x.astype(streams.dtype), MixerState(carried, write_to)


class DynamicCoefficients(nnx.Module):
    """What a token adds to the coefficients: `s tanh(LayerNorm(H) W)`."""

    def __init__(self, width: int, streams: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.write_to = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.read_from = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.carry = nnx.Param(jnp.zeros((width, streams), jnp.float32))
        self.write_scale = nnx.Param(jnp.full((), 0.01, jnp.float32))
        self.carry_scale = nnx.Param(jnp.full((), 0.01, jnp.float32))

    def __call__(self, streams: Streams) -> Coefficients:
        """Additions to `B`, `A_m` and `A_r`."""
        x = self.norm(at_least_float32(streams))
        return (
            self.write_scale[...] * jnp.tanh(x @ self.write_to[...]),
            self.carry_scale[...] * jnp.tanh(x @ self.read_from[...]),
            self.carry_scale[...] * jnp.tanh(x @ self.carry[...]),
        )
