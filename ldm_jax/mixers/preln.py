"""The ordinary PreLN residual stream: `h <- h + f(norm(h))`. The state is the stream."""

from typing import Any

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
        return state._replace(stream=state.stream + output), None

    def undo(self, memory: Any, kept: None) -> Any:
        """A memory, where another sublayer's mixer has one, is not touched."""
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
