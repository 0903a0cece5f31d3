"""A block: an attention sublayer, then an MLP sublayer. The depth mixer reads their inputs and writes their outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array

from ldm_jax.config import ModelConfig
from ldm_jax.mixers import MixerConfig, MixerLayer, MixerState, Place, Stack, make_layer
from ldm_jax.nn.attention import Attention, Documents
from ldm_jax.nn.cache import KeyValues, Places
from ldm_jax.nn.initializers import rms_norm
from ldm_jax.nn.mlp import MLP
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import Hidden


class Sublayer(nnx.Module):
    """`x, state <- read(state); state <- write(state, f(norm(x)))`."""

    def __init__(self, function: Callable[..., Hidden], mixer: MixerLayer, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = rms_norm(config.width, config, rngs)
        self.function = function
        self.mixer = mixer

    def __call__(self, state: MixerState, *inputs: Any) -> tuple[MixerState, Any]:
        """The mixer's state after the sublayer, and the residual of its write. `inputs` are passed on to `f`."""
        x, state = self.mixer.read(state)
        output = self.function(self.norm(constrain(x, Axis.BATCH, Axis.TOKENS, None)), *inputs)
        return self.mixer.write(state, constrain(output, Axis.BATCH, Axis.TOKENS, None))


class BlockResidual(NamedTuple):
    """The residual of a block: the stream before it, and the residual of each write."""

    stream: Any
    attention: Any
    mlp: Any


class Block(nnx.Module):
    """Attention, then MLP. `index` is the block's number, counted from 0.

    The mixer has a separate random key, so that all other parameters are the same for every mixer.
    """

    def __init__(self, config: ModelConfig, mixer: MixerConfig, index: int | Array, *, rngs: nnx.Rngs):
        mixer_rngs = nnx.Rngs(rngs.mixer())

        def sublayer(function: Callable[..., Hidden], last: bool) -> Sublayer:
            stack = Stack(config.width, config.sublayers, config.dtype, config.scan)
            layer = make_layer(mixer, stack, Place(index, last), mixer_rngs)
            return Sublayer(function, layer, config, rngs)

        self.attention = sublayer(Attention(config, rngs=rngs), last=False)
        self.mlp = sublayer(MLP(config, rngs=rngs), last=True)

    def __call__(self, state: MixerState, documents: Documents | None = None) -> tuple[MixerState, BlockResidual]:
        """The mixer's state after the block, and the residual for `undo`."""
        stream = state.stream
        state, attention = self.attention(state, documents)
        state, mlp = self.mlp(state)
        return state, BlockResidual(stream, attention, mlp)

    def decode(self, state: MixerState, cache: KeyValues, places: Places) -> tuple[MixerState, KeyValues]:
        """The mixer's state of new tokens after the block, and the updated cache of its attention."""
        sublayer = self.attention
        assert isinstance(sublayer.function, Attention)
        x, state = sublayer.mixer.read(state)
        x = constrain(x, Axis.BATCH, Axis.TOKENS, None)
        output, cache = sublayer.function.decode(sublayer.norm(x), cache, places)
        state, _ = sublayer.mixer.write(state, constrain(output, Axis.BATCH, Axis.TOKENS, None))
        state, _ = self.mlp(state)
        return state, cache

    def undo(self, state: MixerState, residual: BlockResidual) -> MixerState:
        """The mixer's state before the block, from the state after it."""
        memory = self.mlp.mixer.undo(state.memory, residual.mlp)
        return MixerState(residual.stream, self.attention.mixer.undo(memory, residual.attention))


def sublayer_name(index: int) -> str:
    """The name of the sublayer with this index: attention 1, MLP 1, attention 2, ..."""
    return f"{('attention', 'MLP')[index % 2]} {index // 2 + 1}"
