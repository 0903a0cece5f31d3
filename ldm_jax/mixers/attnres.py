"""Attention Residuals (AttnRes): every sublayer attends, along depth, to the outputs of all earlier sublayers.

Source: Attention Residuals, arXiv 2603.15031. "Our choice" marks what the paper does not specify.
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

EPSILON = 1e-6  # in the RMS of the keys; our choice


class DepthAttention(nnx.Module):
    """`sum_i a_i v_i` over sources `v_i` with `a = softmax_i(w . (gain * v_i / rms(v_i)))`, without `1/sqrt(D)`.

    `w` is initialised to 0, which makes the weights equal, and `gain` to 1. Scores and softmax are float32.
    """

    def __init__(self, width: int):
        self.query = param(jnp.zeros((width,), jnp.float32))
        self.gain = param(jnp.ones((width,), jnp.float32))

    def score(self, source: Float[Array, "*tokens D"]) -> Float[Array, "*tokens"]:
        """The score of one source, before the softmax."""
        source = at_least_float32(source)
        rms = jnp.sqrt(jnp.mean(source**2, axis=-1) + EPSILON)
        return jnp.sum(source * (self.query[...] * self.gain[...]), axis=-1) / rms

    def weights(self, sources: DepthCache) -> Float[Array, "N *tokens"]:
        """`a` for every source; 0 for sources not yet written."""
        return jax.nn.softmax(self._scores(sources), axis=0)

    def weights_with_partial(
        self, sources: DepthCache, partial: Float[Array, "*tokens D"], started: Any
    ) -> Float[Array, "N_and_partial *tokens"]:
        """`a` with a partial sum as the last source. Its weight is 0 unless its block has started."""
        last = jnp.where(started, self.score(partial), -jnp.inf)
        return jax.nn.softmax(jnp.concatenate([self._scores(sources), last[None]]), axis=0)

    def __call__(self, sources: DepthCache) -> Float[Array, "*tokens D"]:
        """The weighted sum of the sources, at least float32."""
        return _sum(sources, self.weights(sources))

    def with_partial(
        self, sources: DepthCache, partial: Float[Array, "*tokens D"], started: Any
    ) -> Float[Array, "*tokens D"]:
        """The weighted sum of the sources, with a partial sum as the last source if its block has started."""
        weights = self.weights_with_partial(sources, partial, started)
        return _sum(sources, weights[:-1]) + weights[-1][..., None] * at_least_float32(partial)

    def _scores(self, sources: DepthCache) -> Float[Array, "N *tokens"]:
        return jnp.asarray(sources.each(self.score, unwritten=-jnp.inf))


def _sum(sources: DepthCache, weights: Float[Array, "N *tokens"]) -> Float[Array, "*tokens D"]:
    return sources.weighted_sum(weights, lambda source: source)


@dataclass(frozen=True)
class AttnResConfig(MixerOptions):
    """Options of the mixer attnres. There are none."""

    def with_weights(self) -> "AttnResConfig":
        """These options: the layers have `weights`."""
        return self


class AttnResLayer(nnx.Module):
    """A sublayer that reads by attention over the embedding and all earlier outputs, and appends its output to them."""

    def __init__(self, options: AttnResConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del options, place, rngs
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

    def weights(self, state: MixerState) -> Float[Array, "N B T"]:
        """`a`: the weights of the embedding and of every earlier output in a read."""
        return self.attention.weights(state.memory)

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`sum_{i<l} a_i v_i`."""
        return self.attention(state.memory).astype(self.dtype), state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """Appends the output to the sources."""
        return state._replace(memory=state.memory.append(output)), None

    def undo(self, memory: DepthCache, residual: None) -> DepthCache:
        """Removes the last source."""
        del residual
        return memory.without_last()


class AttnResEnds(nnx.Module):
    """The first source is the embedding. The final norm's input is one more read, with a separate query and gain."""

    def __init__(self, options: AttnResConfig, stack: Stack, rngs: nnx.Rngs):
        del options, rngs
        self.sources = stack.sublayers + 1 if stack.scanned else None
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the only source. There is no stream."""
        cache = GrowingCache() if self.sources is None else StackedCache.empty(self.sources, embedding)
        return MixerState((), cache.append(embedding))

    def weights(self, state: MixerState) -> Float[Array, "N B T"]:
        """`a` of the last read."""
        return self.attention.weights(state.memory)

    def finish(self, state: MixerState) -> Hidden:
        """The weighted sum of all sources."""
        return self.attention(state.memory).astype(self.dtype)


MIXER = Mixer("attnres", AttnResConfig, AttnResLayer, AttnResEnds)
