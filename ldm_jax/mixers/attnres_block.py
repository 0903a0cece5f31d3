"""Attention Residuals in blocks: every sublayer attends, along depth, to the sums of blocks of earlier outputs.

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
    """The number of sublayers (not transformer blocks) whose outputs are summed into one source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, but it must be at least 1 (sublayers).")

    def with_weights(self) -> "AttnResBlockConfig":
        """These options: the layers have `weights`."""
        return self

    def source_names(self, sublayers: list[str]) -> list[str]:
        """The names of the embedding, the sums of blocks, and the partial sum."""
        blocks = -(-len(sublayers) // self.block_size)
        return ["embedding", *(f"block {index + 1}" for index in range(blocks)), "partial sum"]


class BlockSources(NamedTuple):
    """The sources other than the partial sum."""

    finished: StackedCache
    """The embedding, then the sum of each finished block."""
    sublayers: Int[Array, ""]
    """The number of outputs written so far."""

    def started(self, block_size: int) -> Bool[Array, ""]:
        """Whether the current block has an output."""
        return self.sublayers % block_size > 0


class AttnResBlockLayer(nnx.Module):
    """A sublayer that reads by attention over the embedding, the sums of finished blocks, and the partial sum.

    The stream is the partial sum: the sum of the outputs of the current block so far. Block `n` consists of the
    sublayers `n S` to `n S + S - 1`, counted from 0, where `S` is the block size.
    """

    def __init__(self, config: AttnResBlockConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del place, rngs
        self.block_size = config.block_size
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

    def weights(self, state: MixerState) -> Float[Array, "N_and_partial B T"]:
        """`a`: the weights of the embedding, the sums of blocks and the partial sum in a read."""
        sources = state.memory
        return self.attention.weights_with_partial(sources.finished, state.stream, sources.started(self.block_size))

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The weighted sum of the sources."""
        sources = state.memory
        x = self.attention.with_partial(sources.finished, state.stream, sources.started(self.block_size))
        return x.astype(self.dtype), state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """Adds the output to the partial sum, which is appended to the sources when the block is finished."""
        finished, sublayers = state.memory
        total, sublayers = state.stream + output, sublayers + 1
        ends = sublayers % self.block_size == 0
        finished = finished.append(total, when=ends)
        return MixerState(jnp.where(ends, 0, total), BlockSources(finished, sublayers)), None

    def undo(self, memory: BlockSources, residual: None) -> BlockSources:
        """Removes the last sum if the write finished a block."""
        del residual
        finished, sublayers = memory
        return BlockSources(finished.without_last(when=sublayers % self.block_size == 0), sublayers - 1)


class AttnResBlockEnds(nnx.Module):
    """As `AttnResEnds`; the partial sum of an unfinished block is a source, too."""

    def __init__(self, config: AttnResBlockConfig, stack: Stack, rngs: nnx.Rngs):
        del rngs
        self.block_size = config.block_size
        self.sources = 1 + -(-stack.sublayers // config.block_size)
        self.dtype = jnp.dtype(stack.dtype)
        self.attention = DepthAttention(stack.width)

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the only source, and an empty block."""
        finished = StackedCache.empty(self.sources, embedding).append(embedding)
        return MixerState(jnp.zeros_like(embedding), BlockSources(finished, jnp.zeros((), jnp.int32)))

    def weights(self, state: MixerState) -> Float[Array, "N_and_partial B T"]:
        """`a` of the last read."""
        sources = state.memory
        return self.attention.weights_with_partial(sources.finished, state.stream, sources.started(self.block_size))

    def finish(self, state: MixerState) -> Hidden:
        """The weighted sum of all sources."""
        sources = state.memory
        x = self.attention.with_partial(sources.finished, state.stream, sources.started(self.block_size))
        return x.astype(self.dtype)


MIXER = Mixer("attnres_block", AttnResBlockConfig, AttnResBlockLayer, AttnResBlockEnds)
