"""The standard PreLN residual stream: `h <- h + f(norm(h))`. The state is the stream."""

from typing import Any

from flax import nnx

from ldm_jax.mixers.mixer import Mixer, MixerOptions, MixerState
from ldm_jax.typing import Hidden


class PreLNLayer(nnx.Module):
    """A sublayer that reads the stream and adds its output to it. It has no parameters."""

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The stream."""
        return state.stream, state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, None]:
        """The stream plus the output."""
        return state._replace(stream=state.stream + output), None

    def undo(self, memory: Any, residual: None) -> Any:
        """The memory, unchanged. It is not empty if the other sublayers of a mixer have one."""
        del residual
        return memory


class PreLNEnds(nnx.Module):
    """The first stream is the embedding; the final norm's input is the last stream. It has no parameters."""

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding."""
        return MixerState(embedding)

    def finish(self, state: MixerState) -> Hidden:
        """The stream."""
        return state.stream


MIXER = Mixer(
    "preln",
    MixerOptions,
    layer=lambda options, stack, place, rngs: PreLNLayer(),
    ends=lambda options, stack, rngs: PreLNEnds(),
)
