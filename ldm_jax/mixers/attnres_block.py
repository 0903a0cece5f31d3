"""Attention Residuals in blocks: every sublayer attends, along depth, to the sums of blocks of sublayers before it.

Source: Attention Residuals, arXiv 2603.15031.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ldm_jax.memory.depth_cache import StackedCache
from ldm_jax.mixers.attnres import DepthAttention
from ldm_jax.mixers.mixer import Mixer, MixerOptions, MixerState, Place, Stack
from ldm_jax.typing import Hidden


@dataclass(frozen=True)
class AttnResBlockConfig(MixerOptions):
    """Options of the mixer attnres_block."""

    block_size: int = 4
    """Sublayers (not blocks of the transformer) whose outputs are summed into one source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, but it must be at least 1 (sublayers).")

    def with_weights(self) -> "AttnResBlockConfig":
        """Itself."""
        return self

    def source_names(self, sublayers: list[str]) -> list[str]:
        """The embedding, the sums of blocks, and the partial sum."""
        blocks = -(-len(sublayers) // self.block_size)
        return ["embedding", *(f"block {index + 1}" for index in range(blocks)), "partial sum"]


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

    def __init__(self, config: AttnResBlockConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del place, rngs
        self.block_size = config.block_size
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

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

    def undo(self, memory: BlockSources, residual: None) -> BlockSources:
        """The finished sums before a write."""
        del residual
        finished, sublayers = memory
        return BlockSources(finished.without_last(when=sublayers % self.block_size == 0), sublayers - 1)


class AttnResBlockEnds(nnx.Module):
    """As `AttnResEnds`; a partial sum that is left over at the end is a source, too."""

    def __init__(self, config: AttnResBlockConfig, stack: Stack, rngs: nnx.Rngs):
        del rngs
        self.block_size = config.block_size
        self.sources = 1 + -(-stack.sublayers // config.block_size)
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

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


MIXER = Mixer("attnres_block", AttnResBlockConfig, AttnResBlockLayer, AttnResBlockEnds)
