"""Linear Depth Memory with every write put off until the next read, so that one kernel does both.

The numbers and the parameters are those of `ldm`; only what is carried differs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ldm_jax.memory import Observation
from ldm_jax.memory.fused import undo_write, write_read
from ldm_jax.mixers.base import MixerState
from ldm_jax.mixers.depth_memory import DepthMemory
from ldm_jax.mixers.depth_memory_config import DepthMemoryConfig
from ldm_jax.mixers.ldm import LDMConfig, LDMEnds, ReadInto
from ldm_jax.mixers.memory_form import Kept, MemoryState, Recurrent
from ldm_jax.mixers.reader_writer import Reader
from ldm_jax.sharding import Axis, constrain, partition
from ldm_jax.typing import DType, Hidden


class Pending(NamedTuple):
    """A write `M <- M + (v - M k) g'` still to be done, of all groups side by side."""

    key: Float[Array, "*tokens G K"]
    gain: Float[Array, "*tokens G K"]
    value: Float[Array, "*tokens D"]
    """In the compute type."""


class FusedState(NamedTuple):
    """Between sublayers: the memory before the last observation, and the inverse covariance after it; float32."""

    memory: Float[Array, "K *tokens D"]
    covariance: MemoryState
    """`M` of width 0, and P."""
    pending: Pending


class Written(NamedTuple):
    """A write that has been done: what undoing it needs."""

    key: Float[Array, "*tokens G K"]
    gain: Float[Array, "*tokens G K"]
    error: Float[Array, "*tokens D"]


class FusedKept(NamedTuple):
    """What undoing a sublayer needs: of the write that was done when it read, and of its own observation in P."""

    written: Written
    covariance: Kept | None


class ReadState(NamedTuple):
    """Between a sublayer's read and its write: nothing is pending."""

    memory: Float[Array, "K *tokens D"]
    covariance: MemoryState
    written: Written


class FusedLDMLayer(nnx.Module):
    """`LDMLayer`, with its parameters; but a read does the write that is pending, and a write is put off."""

    def __init__(self, width: int, sublayers: int, config: LDMConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.read_into = config.read_into
        self.memory = DepthMemory(width, sublayers, config, dtype=dtype, rngs=rngs)

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """`h + read`, after the pending write."""
        readout, memory = _write_read(self.memory.reader, state)
        x = state.stream + readout
        return x, MixerState(x if self.read_into is ReadInto.STREAM else state.stream, memory)

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, FusedKept]:
        """Adds the output to the stream; its observation enters P now and `M` when it is read."""
        memory, covariance, written = state.memory
        observation = self.memory.writer(output, self.memory.forgetting())
        covariance, pending, kept = _observe(self.memory.config, covariance, observation)
        after = MixerState(state.stream + output, FusedState(memory, covariance, pending))
        return after, FusedKept(written, kept)

    def undo(self, memory: FusedState, kept: FusedKept) -> FusedState:
        """The memory before the read, from that after the write."""
        form = Recurrent(self.memory.config.write)
        covariance = form.undo(memory.covariance, kept.covariance, self.memory.forgetting())
        key, gain, error = kept.written
        before, value = on_own_part(undo_write, memory.memory, key, gain, error)
        pending = Pending(key, gain, value.astype(memory.pending.value.dtype))
        return FusedState(before, covariance, pending)


class FusedLDMEnds(LDMEnds):
    """`LDMEnds`; the embedding's write is put off, and the last reader does the last write."""

    def start(self, embedding: Hidden) -> MixerState:
        """The embedding as the stream; as the pending write, too, if asked for."""
        config, tokens, width = self.config, embedding.shape[:-1], embedding.shape[-1]
        memory = jnp.zeros((config.key_dim, *tokens, width))
        if len(tokens) == 2:
            memory = constrain(memory, None, Axis.BATCH, Axis.TOKENS, Axis.GROUPS)
        covariance = Recurrent(config.write).start(tokens, config.groups, 0, config.key_dim, self.alpha)
        if self.writer is None:
            nothing = jnp.zeros((*tokens, config.groups, config.key_dim))
            pending = Pending(nothing, nothing, jnp.zeros_like(embedding))
        else:
            observation = self.writer(embedding, jnp.ones((config.groups,), jnp.float32))
            covariance, pending, _ = _observe(config, covariance, observation)
        return MixerState(embedding, FusedState(memory, covariance, pending))

    def finish(self, state: MixerState) -> Hidden:
        """`h + read`, after the last write."""
        return state.stream + _write_read(self.reader, state)[0]


def _write_read(reader: Reader, state: MixerState) -> tuple[Hidden, ReadState]:
    """The readout for the stream, after the pending write; and the memory then."""
    memory, covariance, (key, gain, value) = state.memory
    query, scale = reader.ask(state.stream)
    memory, error, readout = on_own_part(write_read, memory, key, gain, value, scale[..., None] * query)
    return readout, ReadState(memory, covariance, Written(key, gain, error))


def on_own_part(
    kernel: Callable[..., Any], memory: Float[Array, "K *tokens D"], key: Float[Array, "*tokens G K"], *others: Array
) -> Any:
    """`write_read` or `undo_write`, on a mesh of each device's own tokens and groups: no compiler splits a kernel.

    Args:
        kernel: of `memory`, `key` and the others; returns a memory and values.
        memory: of all groups side by side.
        key: by group.
        others: keys, of the shape of `key`, and values, of the memory's without its first axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or key.ndim != 4:
        return kernel(memory, key, *others)
    rows, tokens, groups, _ = partition(key.shape, (Axis.BATCH, Axis.TOKENS, Axis.GROUPS, None), dict(mesh.shape))
    of_memory, of_values = PartitionSpec(None, rows, tokens, groups), PartitionSpec(rows, tokens, groups)
    by_group = PartitionSpec(rows, tokens, groups, None)
    of_others = (by_group if other.ndim == key.ndim else of_values for other in others)
    results = jax.eval_shape(kernel, memory, key, *others)
    run = jax.shard_map(
        kernel,
        in_specs=(of_memory, by_group, *of_others),
        out_specs=(of_memory, *[of_values] * (len(results) - 1)),
        check_vma=False,
    )
    return run(memory, key, *others)


def _observe(
    config: DepthMemoryConfig, covariance: MemoryState, observation: Observation
) -> tuple[MemoryState, Pending, Kept | None]:
    """P with the observation, the write that it asks of `M`, and what undoing P needs."""
    value = observation.value
    without = observation._replace(value=value[..., :0])
    covariance, kept = Recurrent(config.write).write(covariance, without)
    assert kept is not None  # the options allow only writes that can be undone
    _, u, s = kept.correction
    gain = (kept.importance / s)[..., None] * u
    return covariance, Pending(observation.key, gain, value.reshape(*value.shape[:-2], -1)), kept
