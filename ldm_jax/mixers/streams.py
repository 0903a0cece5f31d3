"""What the mixers of several streams `[B, T, E, D]` share: options, the write, start and end."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from ldm_jax.mixers.mixer import MixerOptions, MixerState, Stack, at_least_float32
from ldm_jax.typing import Hidden


@dataclass(frozen=True)
class StreamsOptions(MixerOptions):
    """What mixers of several streams have in common."""

    streams: int = 4
    """E: streams of the model's width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}, but it must be at least 1.")

    @property
    def irreversible(self) -> str | None:
        """Undoing a write would have to invert the matrix that mixes the streams."""
        return "a write to mixed streams cannot be undone: it would divide by a matrix that mixes streams"


class StreamsLayer(nnx.Module):
    """A sublayer whose `read` returns, for `write`, the mixed streams and their weights `b` `[.., E]` of the output."""

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """`mixed + b o`, in the compute type."""
        streams = state.stream + state.memory[..., None] * at_least_float32(output[..., None, :])
        return MixerState(streams.astype(output.dtype)), None

    def undo(self, memory: tuple[()], residual: None) -> tuple[()]:
        """The memory, which is empty: the streams are saved."""
        del residual
        return memory


class StreamsEnds(nnx.Module):
    """The streams start as copies of the embedding and are summed at the end."""

    def __init__(self, options: StreamsOptions, stack: Stack, rngs: nnx.Rngs):
        del stack, rngs
        self.streams = options.streams

    def start(self, embedding: Hidden) -> MixerState:
        """Copies of the embedding."""
        return MixerState(jnp.repeat(embedding[..., None, :], self.streams, axis=-2))

    def finish(self, state: MixerState) -> Hidden:
        """The sum of the streams."""
        return jnp.sum(at_least_float32(state.stream), axis=-2).astype(state.stream.dtype)
