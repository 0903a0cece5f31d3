"""The common parts of mixers with several streams `[B, T, E, D]`: options, the write, and the ends."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from ldm_jax.mixers.mixer import MixerOptions, MixerState, Stack, at_least_float32
from ldm_jax.typing import Hidden


@dataclass(frozen=True)
class StreamsOptions(MixerOptions):
    """The options that mixers with several streams have in common."""

    streams: int = 4
    """E: the number of streams."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}, but it must be at least 1.")

    @property
    def irreversible(self) -> str | None:
        """Undoing a write would require the inverse of the mixing matrix."""
        return "a write to mixed streams cannot be undone: it would need the inverse of the mixing matrix"


class StreamsLayer(nnx.Module):
    """A sublayer whose `read` passes to `write` the mixed streams and the output's weight `b` `[..., E]` in each."""

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """`mixed + b o`, in the compute type."""
        streams = state.stream + state.memory[..., None] * at_least_float32(output[..., None, :])
        return MixerState(streams.astype(output.dtype)), None

    def undo(self, memory: tuple[()], residual: None) -> tuple[()]:
        """The memory, which is empty. The streams are saved."""
        del residual
        return memory


class StreamsEnds(nnx.Module):
    """The first streams are copies of the embedding; the final norm's input is the sum of the last streams."""

    def __init__(self, options: StreamsOptions, stack: Stack, rngs: nnx.Rngs):
        del stack, rngs
        self.streams = options.streams

    def start(self, embedding: Hidden) -> MixerState:
        """Copies of the embedding."""
        return MixerState(jnp.repeat(embedding[..., None, :], self.streams, axis=-2))

    def finish(self, state: MixerState) -> Hidden:
        """The sum of the streams."""
        return jnp.sum(at_least_float32(state.stream), axis=-2).astype(state.stream.dtype)
