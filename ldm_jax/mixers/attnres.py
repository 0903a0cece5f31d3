"""Attention Residuals (AttnRes): every sublayer attends, along depth, to the outputs of those before it.

Source: Attention Residuals, arXiv 2603.15031. Where the paper is silent, "our choice" is said.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.memory.depth_cache import DepthCache, GrowingCache, StackedCache
from ldm_jax.mixers.base import MixerState, at_least_float32
from ldm_jax.options import check_option_types
from ldm_jax.typing import DType, Hidden

EPSILON = 1e-6  # of the keys' norm; our choice


@dataclass(frozen=True)
class AttnResBlockConfig:
    """Options of the mixer attnres_block."""

    block_size: int = 4
    """Sublayers (not blocks of the transformer) whose outputs are summed into one source."""

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, but it must be at least 1 (sublayers).")


class DepthAttention(nnx.Module):
    """`sum_i a_i v_i` over sources `v_i` with `a = softmax_i(w . (gain * v_i / rms(v_i)))`, without `1/sqrt(D)`.

    `w` is zero at the start, which makes the weights equal, and `gain` one. Scores and softmax are float32.
    """

    def __init__(self, width: int):
        self.query = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.gain = nnx.Param(jnp.ones((width,), jnp.float32))

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


class AttnResLayer(nnx.Module):
    """Reads by attention over the embedding and all outputs so far; its output becomes one more source."""

    def __init__(self, width: int, *, dtype: DType):
        self.dtype = jnp.dtype(dtype)
        self.attention = DepthAttention(width)

    def weights(self, state: MixerState) -> Float[Array, "N B T"]:
        """`a`: what the embedding and every earlier sublayer contribute to a read."""
        return self.attention.weights(state.memory)

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`sum_{i<l} a_i v_i`."""
        return self.attention(state.memory).astype(self.dtype), state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """One more source."""
        return state._replace(memory=state.memory.append(output)), None

    def undo(self, memory: DepthCache, kept: None) -> DepthCache:
        """The sources before a write."""
        del kept
        return memory.without_last()


class AttnResEnds(nnx.Module):
    """The first source is the embedding; the final norm is given one more read, with a query and gain of its own."""

    def __init__(self, width: int, *, scanned_sublayers: int | None, dtype: DType):
        self.sources = None if scanned_sublayers is None else scanned_sublayers + 1
        self.dtype = jnp.dtype(dtype)
        self.attention = DepthAttention(width)

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


class BlockSources(NamedTuple):
    """What is read beside the partial sum."""

    finished: StackedCache
    """The embedding, then the sum of each finished block."""
    sublayers: Int[Array, ""]
    """Written so far."""

    def started(self, block_size: int) -> Bool[Array, ""]:
        """Whether the block that the next sublayer is in has an output already."""
        return self.sublayers % block_size > 0


class AttnResBlockLayer(nnx.Module):
    """Reads by attention over the embedding, the sums of finished blocks and, once begun, that of its own block.

    The stream is the partial sum of the block. Sublayers `n S .. n S + S - 1`, counted from 0, are block `n`.
    """

    def __init__(self, width: int, config: AttnResBlockConfig, *, dtype: DType):
        self.block_size = config.block_size
        self.dtype = jnp.dtype(dtype)
        self.attention = DepthAttention(width)

    def weights(self, state: MixerState) -> Float[Array, "N_and_partial B T"]:
        """`a`: what the embedding, the sums of blocks and the partial sum contribute to a read."""
        sources = state.memory
        return self.attention.weights_with_partial(sources.finished, state.stream, sources.started(self.block_size))

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The sum over the sources."""
        sources = state.memory
        x = self.attention.with_partial(sources.finished, state.stream, sources.started(self.block_size))
        return x.astype(self.dtype), state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """Adds the output to its block's sum, which becomes a source of its own when the block is finished."""
        finished, sublayers = state.memory
        total, sublayers = state.stream + output, sublayers + 1
        ends = sublayers % self.block_size == 0
        finished = finished.append(total, when=ends)
        return MixerState(jnp.where(ends, 0, total), BlockSources(finished, sublayers)), None

    def undo(self, memory: BlockSources, kept: None) -> BlockSources:
        """The finished sums before a write."""
        del kept
        finished, sublayers = memory
        return BlockSources(finished.without_last(when=sublayers % self.block_size == 0), sublayers - 1)


class AttnResBlockEnds(nnx.Module):
    """As `AttnResEnds`; a partial sum that is left over at the end is a source, too."""

    def __init__(self, width: int, sublayers: int, config: AttnResBlockConfig, *, dtype: DType):
        self.block_size = config.block_size
        self.sources = 1 + -(-sublayers // config.block_size)
        self.dtype = jnp.dtype(dtype)
        self.attention = DepthAttention(width)

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the only source, and a block that has not begun."""
        finished = StackedCache.empty(self.sources, embedding).append(embedding)
        return MixerState(jnp.zeros_like(embedding), BlockSources(finished, jnp.zeros((), jnp.int32)))

    def weights(self, state: MixerState) -> Float[Array, "N_and_partial B T"]:
        """`a`: what the embedding, the sums of blocks and the partial sum contribute to a read."""
        sources = state.memory
        return self.attention.weights_with_partial(sources.finished, state.stream, sources.started(self.block_size))

    def finish(self, state: MixerState) -> Hidden:
        """The sum over all sources."""
        sources = state.memory
        x = self.attention.with_partial(sources.finished, state.stream, sources.started(self.block_size))
        return x.astype(self.dtype)
