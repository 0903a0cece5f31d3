"""What mixers of several streams share: streams `[B, T, E, D]`, which are mixed, and written to in parts."""

import jax.numpy as jnp
from flax import nnx

from ldm_jax.mixers.base import MixerState, at_least_float32
from ldm_jax.typing import Hidden


class StreamsLayer(nnx.Module):
    """A sublayer that has read and mixed the streams: its `read` hands on the mixed streams and `b` `[.., E]`."""

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """`mixed + b o`, in the compute type."""
        streams = state.stream + state.memory[..., None] * at_least_float32(output[..., None, :])
        return MixerState(streams.astype(output.dtype)), None

    def undo(self, memory: tuple[()], kept: None) -> tuple[()]:
        """There is no memory: the streams are saved."""
        del kept
        return memory


class StreamsEnds(nnx.Module):
    """The streams start as copies of the embedding and are summed at the end."""

    def __init__(self, streams: int):
        self.streams = streams

    def start(self, embedding: Hidden) -> MixerState:
        """Copies of the embedding."""
        return MixerState(jnp.repeat(embedding[..., None, :], self.streams, axis=-2))

    def finish(self, state: MixerState) -> Hidden:
        """The sum of the streams."""
        return jnp.sum(at_least_float32(state.stream), axis=-2).astype(state.stream.dtype)
