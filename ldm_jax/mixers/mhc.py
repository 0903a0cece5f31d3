"""Manifold-constrained Hyper-Connections (mHC): streams are mixed by doubly stochastic matrices.

Source: mHC, arXiv 2512.24880. Streams are `[B, T, E, D]`; they start as copies and are summed at the end (our choice,
as in Hyper-Connections). How `phi` and `b` start is not published: see `MHCLayer`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.mixer import Mixer, MixerState, Place, Stack, at_least_float32
from ldm_jax.mixers.streams import StreamsEnds, StreamsLayer, StreamsOptions
from ldm_jax.parameters import param
from ldm_jax.sharding import Axis
from ldm_jax.typing import Hidden

SINKHORN_ROUNDS = 20
EPSILON = 1e-6  # of the norm over all streams


@dataclass(frozen=True)
class MHCConfig(StreamsOptions):
    """Options of the mixer mhc."""

    initial_diagonal: float = 2.0
    """Logit of every stream for itself in the mixing matrix at the start, those for others being 0: our choice. With
    2 and four streams .71 of a stream stays in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not abs(self.initial_diagonal) < 8:
            raise ValueError(
                f"initial_diagonal is {self.initial_diagonal}, but it must lie between -8 and 8: further out the "
                "mixing matrix hardly learns."
            )


class MHCLayer(StreamsLayer):
    """`x <- H_res x + H_post' f(H_pre x)` for streams `x` `[E, D]`.

    With `x'` the RMSNorm, without a gain, over all `E D` numbers: `pre~ = a_pre x' phi_pre + b_pre`, likewise post and
    res; `H_pre = sigmoid(pre~)`, `H_post = 2 sigmoid(post~)`, `H_res = sinkhorn(res~)`. All of that is float32.

    At the start `a = .01`; our choices: `phi` is normal with variance `1 / (E D)`, so that streams can become
    different; `b_pre = b_post = 0`; `b_res` is `initial_diagonal` times the identity. With `phi = 0` that is PreLN,
    whatever `b_res`.
    """

    def __init__(self, config: MHCConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del place
        streams = self.streams = config.streams
        numbers = streams * stack.width
        size = streams * (streams + 2)
        phi = jax.random.normal(rngs.params(), (numbers, size), jnp.float32) * numbers**-0.5
        self.phi = param(phi, Axis.WIDTH, None)
        self.scale = param(jnp.full((3,), 0.01, jnp.float32))
        diagonal = config.initial_diagonal * jnp.eye(streams, dtype=jnp.float32)
        self.bias = param(jnp.concatenate([jnp.zeros((2 * streams,), jnp.float32), diagonal.ravel()]))

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`H_pre x`; the state for `write` is `H_res x` and `H_post`."""
        streams = state.stream
        exact = at_least_float32(streams)
        pre, post, mix = self.coefficients(exact)
        x = jnp.einsum("...e,...ed->...d", pre, exact)
        mixed = jnp.einsum("...ij,...jd->...id", mix, exact)
        return x.astype(streams.dtype), MixerState(mixed, post)

    def coefficients(
        self, streams: Float[Array, "B T E D"]
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"], Float[Array, "B T E E"]]:
        """`H_pre`, `H_post` and `H_res`."""
        flat = streams.reshape(*streams.shape[:-2], -1)
        normed = flat * jax.lax.rsqrt(jnp.mean(flat**2, axis=-1, keepdims=True) + EPSILON)
        count = self.streams
        scale = jnp.repeat(self.scale[...], jnp.asarray([count, count, count**2]), total_repeat_length=self.bias.size)
        logits = scale * (normed @ self.phi[...]) + self.bias[...]
        pre, post, mix = jnp.split(logits, [count, 2 * count], axis=-1)
        return jax.nn.sigmoid(pre), 2 * jax.nn.sigmoid(post), sinkhorn(mix.reshape(*mix.shape[:-1], count, count))


def sinkhorn(logits: Float[Array, "*batch E E"]) -> Float[Array, "*batch E E"]:
    """A doubly stochastic matrix: `exp(logits)` scaled 20 times, columns first, then rows, to sums of 1.

    In logarithms, which neither overflow nor need an epsilon.
    """

    def scale(logits: Float[Array, "*batch E E"], _: None) -> tuple[Float[Array, "*batch E E"], None]:
        logits = logits - jax.nn.logsumexp(logits, axis=-2, keepdims=True)
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True), None

    return jnp.exp(jax.lax.scan(scale, logits, length=SINKHORN_ROUNDS)[0])


MIXER = Mixer("mhc", MHCConfig, MHCLayer, StreamsEnds)
