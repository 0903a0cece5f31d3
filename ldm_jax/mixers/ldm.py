"""Linear Depth Memory as a mixer: the PreLN stream, and beside it the depth memory of every token."""

import enum
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.base import MixerState
from ldm_jax.mixers.depth_memory import DepthMemory
from ldm_jax.mixers.depth_memory_config import DepthMemoryConfig
from ldm_jax.mixers.memory_form import AnyState, Kept, MemoryState, make_form
from ldm_jax.mixers.reader_writer import Reader, Writer
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import DType, Hidden


class ReadInto(enum.StrEnum):
    """Where a readout goes."""

    BRANCH = "branch"
    STREAM = "stream"


@dataclass(frozen=True)
class LDMConfig(DepthMemoryConfig):
    """Options of the mixer ldm."""

    read_into: ReadInto = ReadInto.BRANCH
    """branch: a sublayer's input gets the readout, the stream stays the PreLN sum. stream: the stream gets it, too."""
    learned_alpha: bool = False
    """alpha is learned, one for each group, as its logarithm; it starts at `alpha`."""
    write_embedding: bool = True
    """Write the embedding as observation 0."""


class LDMLayer(nnx.Module):
    """One sublayer: `o = f(norm(h + read)); h <- h + o; write (key(o), o)`."""

    def __init__(self, width: int, sublayers: int, config: LDMConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.read_into = config.read_into
        self.memory = DepthMemory(width, sublayers, config, dtype=dtype, rngs=rngs)

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`h + read`, the stream being the context of the read. Into the stream goes, if asked for, what was read."""
        x = state.stream + self.memory.read(state.memory, state.stream)
        return x, state._replace(stream=x) if self.read_into is ReadInto.STREAM else state

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, Kept | None]:
        """Adds the output to the stream and observes it."""
        memory, kept = self.memory.record(state.memory, output)
        return MixerState(state.stream + output, memory), kept

    def undo(self, memory: AnyState, kept: Kept | None) -> AnyState:
        """The memory before the write."""
        return self.memory.undo(memory, kept)


class LDMEnds(nnx.Module):
    """Before the stack the embedding is observed, if asked for; after it a last reader adds to the stream."""

    def __init__(self, width: int, config: LDMConfig, *, scanned_sublayers: int | None, dtype: DType, rngs: nnx.Rngs):
        self.config = config
        self.writes = None if scanned_sublayers is None else scanned_sublayers + config.write_embedding
        self.dtype = dtype
        self.reader = Reader(width, config, dtype=dtype, rngs=rngs)
        self.writer = Writer(width, config, dtype=dtype, rngs=rngs) if config.write_embedding else None
        start = jnp.full((config.groups,), math.log(config.alpha), jnp.float32)
        self.log_alpha = nnx.Param(start) if config.learned_alpha else None

    @property
    def alpha(self) -> Float[Array, ""] | Float[Array, " G"]:
        """One over the ridge."""
        return jnp.asarray(self.config.alpha) if self.log_alpha is None else jnp.exp(self.log_alpha[...])

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the stream, and a memory that knows it or nothing."""
        config, tokens, width = self.config, embedding.shape[:-1], embedding.shape[-1]
        shape = config.groups, width // config.groups, config.key_dim
        memory = make_form(config, self.writes).start(tokens, *shape, self.alpha, self.dtype)
        if isinstance(memory, MemoryState) and len(tokens) == 2:
            axes = Axis.BATCH, Axis.TOKENS, Axis.GROUPS, None, None
            memory = MemoryState(*(constrain(part, *axes) for part in memory))
        if self.writer is not None:
            # Forgetting of the first observation would only rescale alpha.
            observation = self.writer(embedding, jnp.ones((config.groups,), jnp.float32))
            memory, _ = make_form(config).write(memory, observation)
        return MixerState(embedding, memory)

    def finish(self, state: MixerState) -> Hidden:
        """`h + read`."""
        return state.stream + self.reader(state.memory, state.stream)


def without_reads(params: Any) -> Any:
    """The parameters with every read gain at zero: the memory is written and never heard."""

    def silence(path: tuple[Any, ...], leaf: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.zeros_like(leaf) if any(getattr(part, "key", None) == "gain" for part in path) else leaf

    return jax.tree_util.tree_map_with_path(silence, params)
