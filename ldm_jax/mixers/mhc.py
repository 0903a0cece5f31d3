"""Manifold-constrained Hyper-Connections (mHC): streams are mixed by doubly stochastic matrices.

Source: mHC, arXiv 2512.24880. Streams are `[B, T, E, D]`. They are initialised to copies of the embedding and summed at
the end (our choice, as in Hyper-Connections). The initial `phi` and `b` are not published: see `MHCLayer`.
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
EPSILON = 1e-6  # in the RMS over all streams


@dataclass(frozen=True)
class MHCConfig(StreamsOptions):
    """Options of the mixer mhc."""

    initial_diagonal: float = 2.0
    """Initial diagonal of the mixing matrix's logits; the others start at 0. Our choice. With 2 and four streams, the
    diagonal of the initial mixing matrix is .71."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not abs(self.initial_diagonal) < 8:
            raise ValueError(
                f"initial_diagonal is {self.initial_diagonal}, but it must lie between -8 and 8: for larger values the "
                "gradient of the mixing matrix nearly vanishes."
            )


class MHCLayer(StreamsLayer):
    """`x <- H_res x + H_post' f(H_pre x)` for streams `x` `[E, D]`.

    With `n` the RMSNorm of `x`, without a scale, over all `E D` entries: `pre~ = a_pre n phi_pre + b_pre`, and
    similarly for post and res; `H_pre = sigmoid(pre~)`, `H_post = 2 sigmoid(post~)`, `H_res = sinkhorn(res~)`.
    Coefficients are float32.

    Initially `a = .01`. Our choices: `phi` is normal with variance `1 / (E D)`, so that the streams can diverge from
    each other; `b_pre = b_post = 0`; `b_res` is `initial_diagonal` times the identity. With `phi = 0` this is PreLN for
    every `b_res`. Weight decay applies to `phi` only, and Muon is for `phi` only (as in DeepSeek-V4, arXiv 2606.19348).
    """

    def __init__(self, config: MHCConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del place
        streams = self.streams = config.streams
        inputs = streams * stack.width
        outputs = streams * (streams + 2)
        phi = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * inputs**-0.5
        self.phi = param(phi, Axis.WIDTH, None, decays=True, muon=True)
        self.scale = param(jnp.full((3,), 0.01, jnp.float32))
        diagonal = config.initial_diagonal * jnp.eye(streams, dtype=jnp.float32)
        self.bias = param(jnp.concatenate([jnp.zeros((2 * streams,), jnp.float32), diagonal.ravel()]))

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`H_pre x`, and the state for `write`: `H_res x` and `H_post`."""
        streams = state.stream
        exact = at_least_float32(streams)
        pre, post, mix = self.coefficients(exact)
        x = jnp.einsum("...e,...ed->...d", pre, exact, precision="highest")
        mixed = jnp.einsum("...ij,...jd->...id", mix, exact, precision="highest")
        return x.astype(streams.dtype), MixerState(mixed, post)

    def coefficients(
        self, streams: Float[Array, "B T E D"]
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"], Float[Array, "B T E E"]]:
        """`H_pre`, `H_post` and `H_res`."""
        flat = streams.reshape(*streams.shape[:-2], streams.shape[-2] * streams.shape[-1])
        normed = flat * jax.lax.rsqrt(jnp.mean(flat**2, axis=-1, keepdims=True) + EPSILON)
        count = self.streams
        scale = jnp.repeat(self.scale[...], jnp.asarray([count, count, count**2]), total_repeat_length=self.bias.size)
        logits = scale * jnp.matmul(normed, self.phi[...], precision="highest") + self.bias[...]
        pre, post, mix = jnp.split(logits, [count, 2 * count], axis=-1)
        return jax.nn.sigmoid(pre), 2 * jax.nn.sigmoid(post), sinkhorn(mix.reshape(*mix.shape[:-1], count, count))


def sinkhorn(logits: Float[Array, "*batch E E"]) -> Float[Array, "*batch E E"]:
    """A doubly stochastic matrix: 20 rounds of scaling the columns, then the rows, of `exp(logits)` to sums of 1.

    Computed in the log domain, which does not overflow and needs no epsilon.
    """

    def scale(logits: Float[Array, "*batch E E"], _: None) -> tuple[Float[Array, "*batch E E"], None]:
        logits = logits - jax.nn.logsumexp(logits, axis=-2, keepdims=True)
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True), None

    return jnp.exp(jax.lax.scan(scale, logits, length=SINKHORN_ROUNDS)[0])


MIXER = Mixer("mhc", MHCConfig, MHCLayer, StreamsEnds)
