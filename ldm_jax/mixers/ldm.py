"""Linear Depth Memory as a mixer: the PreLN stream plus a depth memory for every token."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.depth_memory import (
    AnyState,
    DepthMemory,
    DepthMemoryConfig,
    Reader,
    Writer,
    make_form,
    shard_state,
)
from ldm_jax.mixers.mixer import Mixer, MixerState, Place, Stack
from ldm_jax.parameters import param
from ldm_jax.sharding import Axis
from ldm_jax.typing import Hidden


@dataclass(frozen=True)
class LDMConfig(DepthMemoryConfig):
    """Options of the mixer ldm."""

    learned_alpha: bool = False
    """Learn the logarithm of alpha, one per group, starting from `alpha`; alpha is clipped to its range."""
    write_embedding: bool = True
    """Write the embedding as observation 0."""

    def source_names(self, sublayers: list[str]) -> list[str]:
        """The names of the observations."""
        return super().source_names(sublayers) if self.write_embedding else sublayers


class LDMLayer(nnx.Module):
    """One sublayer: `o = f(norm(h + read)); h <- h + o; write (key(o), o)`."""

    def __init__(self, config: LDMConfig, stack: Stack, place: Place, rngs: nnx.Rngs):
        del place
        self.memory = DepthMemory(stack.width, stack.sublayers, config, dtype=stack.dtype, rngs=rngs)

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`h + read`. The context of the read is the stream."""
        readout, memory = self.memory.recall(state.memory, state.stream)
        return state.stream + readout, MixerState(state.stream, memory)

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, Any]:
        """Adds the output to the stream and writes its observation."""
        memory, residual = self.memory.record(state.memory, output)
        return MixerState(state.stream + output, memory), residual

    def undo(self, memory: AnyState, residual: Any) -> AnyState:
        """The memory before the read."""
        return self.memory.undo(memory, residual)


class LDMEnds(nnx.Module):
    """Writes the embedding before the first sublayer, if configured, and adds one more read after the last."""

    def __init__(self, config: LDMConfig, stack: Stack, rngs: nnx.Rngs):
        self.config, self.dtype = config, stack.dtype
        self.writes = stack.sublayers + config.write_embedding if stack.scanned else None
        self.reader = Reader(stack.width, config, dtype=stack.dtype, rngs=rngs)
        self.writer = Writer(stack.width, config, dtype=stack.dtype, rngs=rngs) if config.write_embedding else None
        start = jnp.full((config.groups,), math.log(config.alpha), jnp.float32)
        self.log_alpha = param(start, Axis.GROUPS) if config.learned_alpha else None

    @property
    def alpha(self) -> Float[Array, ""] | Float[Array, " G"]:
        """The inverse of the ridge."""
        if self.log_alpha is None:
            return jnp.asarray(self.config.alpha)
        smallest, largest = map(math.log, self.config.alpha_range)
        learned = self.log_alpha[...]
        # The gradient is that of the unclipped value, so that a learned alpha can return into the range.
        beyond = jax.lax.stop_gradient(learned - jnp.clip(learned, smallest, largest))
        return jnp.exp(learned - beyond)

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the stream, and the memory, to which the embedding is written if configured."""
        tokens, width = embedding.shape[:-1], embedding.shape[-1]
        form = make_form(self.config, width, depth=self.writes, dtype=self.dtype)
        # Forgetting at the first observation would only rescale alpha.
        ones = jnp.ones((self.config.groups,), jnp.float32)
        first = None if self.writer is None else self.writer(embedding, ones)
        memory = form.start(tokens, self.alpha, first)
        return MixerState(embedding, shard_state(memory) if len(tokens) == 2 else memory)

    def finish(self, state: MixerState) -> Hidden:
        """`h + read`."""
        readout, _ = self.reader(state.memory, state.stream)
        return state.stream + readout


def without_reads(params: Any) -> Any:
    """The parameters with every read gain set to 0: the memory is written, and reads do not change the stream."""

    def zero(path: tuple[Any, ...], leaf: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.zeros_like(leaf) if any(getattr(part, "key", None) == "gain" for part in path) else leaf

    return jax.tree_util.tree_map_with_path(zero, params)


MIXER = Mixer("ldm", LDMConfig, LDMLayer, LDMEnds)
