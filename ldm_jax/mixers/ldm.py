"""Linear Depth Memory as a mixer: the PreLN stream, and beside it the depth memory of every token."""

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.mixers.depth_memory import (
    DepthMemory,
    DepthMemoryConfig,
    MemoryState,
    Reader,
    Writer,
    init_memory,
)
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
    write_embedding: bool = True
    """Write the embedding as observation 0."""


class LDMState(NamedTuple):
    """The stream in the compute type, the memory in float32."""

    stream: Hidden
    memory: MemoryState


class LDMLayer(nnx.Module):
    """One sublayer: `o = f(norm(h + read)); h <- h + o; write (key(o), o)`."""

    def __init__(self, width: int, sublayers: int, config: LDMConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.read_into = config.read_into
        self.memory = DepthMemory(width, sublayers, config, dtype=dtype, rngs=rngs)

    def read(self, state: LDMState) -> Hidden:
        """`h + read`, the stream being the context of the read."""
        return state.stream + self.memory.read(state.memory, state.stream)

    def write(self, state: LDMState, output: Hidden) -> LDMState:
        """Adds the output to the stream and observes it. Into the stream goes, if asked for, what was read, too."""
        # The second read is the one that the sublayer was given; the compiler computes it once.
        stream = self.read(state) if self.read_into is ReadInto.STREAM else state.stream
        return LDMState(stream + output, self.memory.write(state.memory, output))


class LDMEnds(nnx.Module):
    """Before the stack the embedding is observed, if asked for; after it a last reader adds to the stream."""

    def __init__(self, width: int, config: LDMConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.config = config
        self.reader = Reader(width, config, dtype=dtype, rngs=rngs)
        self.writer = Writer(width, config, dtype=dtype, rngs=rngs) if config.write_embedding else None

    def start(self, embedding: Hidden) -> LDMState:
        """The embedding as the stream, and a memory that knows it or nothing."""
        memory = init_memory(embedding.shape[:-1], embedding.shape[-1], self.config)
        if self.writer is not None:
            # Forgetting of the first observation would only rescale alpha.
            memory = self.writer(memory, embedding, jnp.ones((self.config.groups,), jnp.float32))
        return LDMState(embedding, memory)

    def finish(self, state: LDMState) -> Hidden:
        """`h + read`."""
        return state.stream + self.reader(state.memory, state.stream)


def without_reads(params: Any) -> Any:
    """The parameters with every read gain at zero: the memory is written and never heard."""

    def silence(path: tuple[Any, ...], leaf: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.zeros_like(leaf) if any(getattr(part, "key", None) == "gain" for part in path) else leaf

    return jax.tree_util.tree_map_with_path(silence, params)
