"""The ordinary PreLN residual stream: `h <- h + f(norm(h))`. The state is the stream."""

from flax import nnx

from ldm_jax.mixers.base import MixerState
from ldm_jax.typing import Hidden


class PreLNLayer(nnx.Module):
    """Reads the stream and adds to it. Nothing is learned."""

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The stream."""
        return state.stream, state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """The stream plus the output."""
        return MixerState(state.stream + output), None

    def undo(self, memory: tuple[()], kept: None) -> tuple[()]:
        """There is no memory."""
        del kept
        return memory


class PreLNEnds(nnx.Module):
    """The stream starts as the embedding and is handed on as it ends. Nothing is learned."""

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding."""
        return MixerState(embedding)

    def finish(self, state: MixerState) -> Hidden:
        """The stream."""
        return state.stream
