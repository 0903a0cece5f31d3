"""Attention Residuals (AttnRes): every sublayer attends, along depth, to the outputs of the sublayers before it.

Source: Attention Residuals, arXiv 2603.15031. What the paper leaves open is marked "our choice".
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.memory.depth_cache import DepthCache, GrowingCache, StackedCache
from ldm_jax.mixers.mixer import Mixer, MixerOptions, MixerState, Place, Stack, at_least_float32
from ldm_jax.parameters import param
from ldm_jax.typing import Hidden

EPSILON = 1e-6  # of the keys' norm; our choice


class DepthAttention(nnx.Module):
    """`sum_i a_i v_i` over sources `v_i` with `a = softmax_i(w . (gain * v_i / rms(v_i)))`, without `1/sqrt(D)`.

    `w` is zero at the start, which makes the weights equal, and `gain` one. Scores and softmax are float32.
    """

    def __init__(self, width: int):
        self.query = param(jnp.zeros((width,), jnp.float32))
        self.gain = param(jnp.ones((width,), jnp.float32))

    def score(self, source: Float[Array, "*tokens D"]) -> Float[Array, "*tokens"]:
        """What softmax is taken of, for one source."""
        source = at_least_float32(source)
        rms = jnp.sqrt(jnp.mean(source**2, axis=-1) + EPSILON)
        return jnp.sum(source * (self.query[...] * self.gain[...]), axis=-1) / rms

    def weights(self, sources: DepthCache) -> Float[Array, "N *tokens"]:
        """`a`, of every source; 0 where there is none yet."""
        return jax.nn.softmax(self._scores(sources), axis=0)

    def weights_with_partial(
        self, sources: DepthCache, partial: Float[Array, "*tokens D"], started: Any
    ) -> Float[Array, "N_and_partial *tokens"]:
        """`a`, with a partial sum as the last source, whose weight is 0 unless its block has started."""
        last = jnp.where(started, self.score(partial), -jnp.inf)
        return jax.nn.softmax(jnp.concatenate([self._scores(sources), last[None]]), axis=0)

    def __call__(self, sources: DepthCache) -> Float[Array, "*tokens D"]:
        """The sum over the sources, at least float32."""
        return _sum(sources, self.weights(sources))

    def with_partial(
        self, sources: DepthCache, partial: Float[Array, "*tokens D"], started: Any
    ) -> Float[Array, "*tokens D"]:
        """The sum over the sources and, if its block has started, a partial sum as one more."""
        weights = self.weights_with_partial(sources, partial, started)
        return _sum(sources, weights[:-1]) + weights[-1][..., None] * at_least_float32(partial)

    def _scores(self, sources: DepthCache) -> Float[Array, "N *tokens"]:
        return jnp.asarray(sources.each(self.score, unwritten=-jnp.inf))


def _sum(sources: DepthCache, weights: Float[Array, "N *tokens"]) -> Float[Array, "*tokens D"]:
    return sources.weighted_sum(weights, lambda source: source)


@dataclass(frozen=True)
class AttnResConfig(MixerOptions):
    """Options of the mixer attnres: none."""

    def with_weights(self) -> "AttnResConfig":
        """Itself."""
        return self


class AttnResLayer(nnx.Module):
    """Reads by attention over the embedding and all outputs so far; its output becomes one more source."""

    def __init__(self, options: AttnResConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del options, place, rngs
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

    def weights(self, state: MixerState) -> Float[Array, "N B T"]:
        """`a`: what the embedding and every earlier sublayer contribute to a read."""
        return self.attention.weights(state.memory)

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`sum_{i<l} a_i v_i`."""
        return self.attention(state.memory).astype(self.dtype), state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """One more source."""
        return state._replace(memory=state.memory.append(output)), None

    def undo(self, memory: DepthCache, residual: None) -> DepthCache:
        """The sources before a write."""
        del residual
        return memory.without_last()


class AttnResEnds(nnx.Module):
    """The first source is the embedding; the final norm is given one more read, with a query and gain of its own."""

    def __init__(self, options: AttnResConfig, stack: Stack, rngs: nnx.Rngs):
        del options, rngs
        self.sources = stack.sublayers + 1 if stack.scanned else None
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the only source; there is no stream."""
        cache = GrowingCache() if self.sources is None else StackedCache.empty(self.sources, embedding)
        return MixerState((), cache.append(embedding))

    def weights(self, state: MixerState) -> Float[Array, "N B T"]:
        """`a`, of the last read."""
        return self.attention.weights(state.memory)

    def finish(self, state: MixerState) -> Hidden:
        """The sum over all sources."""
        return self.attention(state.memory).astype(self.dtype)


MIXER = Mixer("attnres", AttnResConfig, AttnResLayer, AttnResEnds)
