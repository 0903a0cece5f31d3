"""Hyper-Connections: every sublayer reads a weighted sum of several streams, and adds its weighted output to each.

Source: Hyper-Connections, arXiv 2409.19606. Streams are `[B, T, E, D]`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.mixer import Mixer, MixerState, Place, Stack, at_least_float32
from ldm_jax.mixers.streams import StreamsEnds, StreamsLayer, StreamsOptions
from ldm_jax.parameters import param
from ldm_jax.typing import Hidden, Streams

Coefficients = tuple[Float[Array, "B T E"], Float[Array, "B T E"], Float[Array, "B T E E"]]
"""`B`, `A_m` and `A_r`: the coefficients of the write, the read and the mixing."""


@dataclass(frozen=True)
class HyperConfig(StreamsOptions):
    """Options of the mixer hc."""

    dynamic: bool = True
    """Compute the coefficients from the token. If false, they are the same for all tokens."""


class HyperLayer(StreamsLayer):
    """`h = A_m' H;  H <- B f(h)' + A_r' H` for streams `H` `[E, D]`.

    If dynamic, with `X` the layer norm of every stream: `B = s_b tanh(X W_b) + b`, `A_m = s_a tanh(X W_m) + a_m`,
    `A_r = s_a tanh(X W_r) + a_r`. Initially `b = 1`, `a_m` selects stream `index mod E`, `a_r = I`, `W = 0` and
    `s = .01`, which is PreLN. `index` is the sublayer's number, counted from 0. Coefficients are float32. The layer
    norm has a scale and a bias, as in PyTorch. Weight decay applies to the maps `W`, not to `b`, `a_m` and `A_r`, as in
    the paper; not to `s` and the norm, which is our choice.
    """

    def __init__(self, config: HyperConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        streams, index = config.streams, 2 * place.block + place.last
        self.write_to = param(jnp.ones((streams,), jnp.float32))
        self.read_from = param((jnp.arange(streams) == index % streams).astype(jnp.float32))
        self.carry = param(jnp.eye(streams, dtype=jnp.float32))
        self.dynamic = DynamicCoefficients(stack.width, streams, rngs=rngs) if config.dynamic else None

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`A_m' H`, and the state for `write`: `A_r' H` and `B`."""
        streams = state.stream
        write_to, read_from, carry = self.write_to[...], self.read_from[...], self.carry[...]
        if self.dynamic is not None:
            by_token = self.dynamic(streams)
            write_to, read_from, carry = write_to + by_token[0], read_from + by_token[1], carry + by_token[2]
        exact = at_least_float32(streams)
        x = jnp.einsum("...e,...ed->...d", read_from, exact, precision="highest")
        carried = jnp.einsum("...ij,...id->...jd", carry, exact, precision="highest")
        return x.astype(streams.dtype), MixerState(carried, write_to)


class DynamicCoefficients(nnx.Module):
    """The part of the coefficients that depends on the token: `s tanh(LayerNorm(H) W)`."""

    def __init__(self, width: int, streams: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.write_to = param(jnp.zeros((width,), jnp.float32), decays=True)
        self.read_from = param(jnp.zeros((width,), jnp.float32), decays=True)
        self.carry = param(jnp.zeros((width, streams), jnp.float32), decays=True, muon=True)
        self.write_scale = param(jnp.full((), 0.01, jnp.float32))
        self.carry_scale = param(jnp.full((), 0.01, jnp.float32))

    def __call__(self, streams: Streams) -> Coefficients:
        """The terms added to `B`, `A_m` and `A_r`."""
        x = self.norm(at_least_float32(streams))
        return (
            self.write_scale[...] * jnp.tanh(jnp.matmul(x, self.write_to[...], precision="highest")),
            self.carry_scale[...] * jnp.tanh(jnp.matmul(x, self.read_from[...], precision="highest")),
            self.carry_scale[...] * jnp.tanh(jnp.matmul(x, self.carry[...], precision="highest")),
        )


MIXER = Mixer("hc", HyperConfig, HyperLayer, StreamsEnds)
