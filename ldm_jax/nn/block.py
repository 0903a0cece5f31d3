"""A block: an attention sublayer, then an MLP sublayer, each joined to the others by the depth mixer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array

from ldm_jax.config import ModelConfig
from ldm_jax.mixers import MixerConfig, MixerLayer, MixerState, Place, Stack, make_layer
from ldm_jax.nn.attention import Attention, Documents
from ldm_jax.nn.cache import KeyValues, Places
from ldm_jax.nn.mlp import MLP
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import Hidden


class Sublayer(nnx.Module):
    """`x, state <- read(state); state <- write(state, f(norm(x)))`."""

    def __init__(self, function: Callable[..., Hidden], mixer: MixerLayer, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.function = function
        self.mixer = mixer

    def __call__(self, state: MixerState, *inputs: Any) -> tuple[MixerState, Any]:
        """The mixer's state after the sublayer, and what undoing its write needs; `f` is given the inputs, too."""
        x, state = self.mixer.read(state)
        output = self.function(self.norm(constrain(x, Axis.BATCH, Axis.TOKENS, None)), *inputs)
        return self.mixer.write(state, constrain(output, Axis.BATCH, Axis.TOKENS, None))


class BlockResidual(NamedTuple):
    """What undoing a block needs: the stream before it, and of each write what its own undoing needs."""

    stream: Any
    attention: Any
    mlp: Any


class Block(nnx.Module):
    """Attention, then MLP; `index` counts blocks from 0.

    The mixer draws from random numbers of its own, so that every mixer meets the same rest.
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
        """The mixer's state after the block, and what `undo` needs."""
        stream = state.stream
        state, attention = self.attention(state, documents)
        state, mlp = self.mlp(state)
        return state, BlockResidual(stream, attention, mlp)

    def decode(self, state: MixerState, cache: KeyValues, places: Places) -> tuple[MixerState, KeyValues]:
        """The mixer's state of new tokens after the block, and the attention's cache with them."""
        sublayer = self.attention
        assert isinstance(sublayer.function, Attention)
        x, state = sublayer.mixer.read(state)
        x = constrain(x, Axis.BATCH, Axis.TOKENS, None)
        output, cache = sublayer.function.decode(sublayer.norm(x), cache, places)
        state, _ = sublayer.mixer.write(state, constrain(output, Axis.BATCH, Axis.TOKENS, None))
        state, _ = self.mlp(state)
        return state, cache

    def undo(self, state: MixerState, residual: BlockResidual) -> MixerState:
        """The mixer's state before the block, from that after it."""
        memory = self.mlp.mixer.undo(state.memory, residual.mlp)
        return MixerState(residual.stream, self.attention.mixer.undo(memory, residual.attention))
