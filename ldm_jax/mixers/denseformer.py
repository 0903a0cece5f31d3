"""DenseFormer: the stream after a block is a weighted average of the outputs of all blocks so far.

Source: DenseFormer, arXiv 2402.02622. A block is a transformer block: attention, then MLP.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from ldm_jax.memory.depth_cache import DepthCache, GrowingCache, StackedCache
from ldm_jax.mixers.mixer import Mixer, MixerLayer, MixerOptions, MixerState, Place, Stack, at_least_float32
from ldm_jax.mixers.preln import PreLNLayer
from ldm_jax.parameters import param
from ldm_jax.typing import Hidden


@dataclass(frozen=True)
class DenseFormerConfig(MixerOptions):
    """Options of the mixer denseformer."""

    dilation: int = 1
    """k: block i averages over blocks i, i - k, i - 2k, ..."""
    period: int = 1
    """p: only blocks p, 2p, ... (counted from 1) average; the others return their output unchanged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dilation", "period"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be at least 1 (blocks).")


class DenseFormerLayer(nnx.Module):
    """The second sublayer of a block: `X_i = h + o`, then `h <- Y_i = sum_{j<=i} a_ij X_j`; `X_0` is the embedding.

    `a_ii` is initialised to 1 and the other weights to 0, which is PreLN. The weights are float32. The output of block
    `i`, counted from 0, is `X_{i + 1}`. The first sublayer of a block is `PreLNLayer`.
    """

    def __init__(self, config: DenseFormerConfig, stack: Stack, place: Place):
        self.config = config
        self.weights = param((jnp.arange(stack.sublayers // 2 + 1) == place.block + 1).astype(jnp.float32))

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The stream."""
        return state.stream, state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """Appends the stream plus the output to the sources. The new stream is the weighted average of the sources."""
        newest = state.stream + output
        outputs = state.memory.append(newest)
        if isinstance(outputs, GrowingCache):
            averages = len(outputs.entries) % self.config.period == 1 % self.config.period
            stream = self._average_grown(outputs) if averages else newest
        elif self.config.period == 1:
            stream = self._average_stacked(outputs)
        else:
            averages = outputs.count % self.config.period == 1
            stream = jax.lax.cond(averages, self._average_stacked, lambda _: newest, outputs)
        return MixerState(stream, outputs), None

    def undo(self, memory: DepthCache, residual: None) -> DepthCache:
        """Removes the last source."""
        del residual
        return memory.without_last()

    def _average_grown(self, outputs: GrowingCache) -> Hidden:
        newest = len(outputs.entries) - 1
        chosen = range(newest % self.config.dilation, newest + 1, self.config.dilation)
        chosen_outputs = jnp.stack([outputs.entries[j] for j in chosen])
        weights = self.weights[...][jnp.asarray(chosen)].reshape(-1, 1, 1, 1)
        return jnp.sum(weights * at_least_float32(chosen_outputs), axis=0).astype(chosen_outputs.dtype)

    def _average_stacked(self, outputs: StackedCache) -> Hidden:
        # The sources are reshaped to rows of k. Block i averages over one column, so only that column is read.
        dilation, newest = self.config.dilation, outputs.count - 1
        length = len(outputs.entries)
        column = newest % dilation
        sources = outputs.entries.reshape(length // dilation, dilation, *outputs.entries.shape[1:])
        sources = jax.lax.dynamic_index_in_dim(sources, column, axis=1, keepdims=False)
        weights = jnp.pad(self.weights[...], (0, length - len(self.weights[...]))).reshape(-1, dilation)
        weights = jax.lax.dynamic_index_in_dim(weights, column, axis=1, keepdims=False)
        written = jnp.arange(length // dilation) * dilation + column <= newest
        weights = jnp.where(written, weights, 0).reshape(-1, 1, 1, 1)
        return jnp.sum(weights * at_least_float32(sources), axis=0).astype(sources.dtype)


class DenseFormerEnds(nnx.Module):
    """The first source is the embedding. The final norm's input is the last stream."""

    def __init__(self, config: DenseFormerConfig, stack: Stack, rngs: nnx.Rngs):
        del rngs
        # Rounded up to a whole number of rows of k sources; see `DenseFormerLayer._average_stacked`.
        rows = -(-(stack.sublayers // 2 + 1) // config.dilation)
        self.sources = rows * config.dilation if stack.scanned else None

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the stream and as the only source."""
        cache = GrowingCache() if self.sources is None else StackedCache.empty(self.sources, embedding)
        return MixerState(embedding, cache.append(embedding))

    def finish(self, state: MixerState) -> Hidden:
        """The stream."""
        return state.stream


def make_layer(config: DenseFormerConfig, stack: Stack, place: Place, rngs: nnx.Rngs) -> MixerLayer:
    """A `DenseFormerLayer` for the last sublayer of a block, and a `PreLNLayer` for the first."""
    del rngs
    return DenseFormerLayer(config, stack, place) if place.last else PreLNLayer()


MIXER = Mixer("denseformer", DenseFormerConfig, make_layer, DenseFormerEnds)
