"""The interface of a depth mixer: how a sublayer's input is computed from what came before, and its output stored.

A mixer is two modules. `MixerEnds` opens the stack with `start` and closes it with `finish`; one `MixerLayer` for each
sublayer (attention and MLP each count as one) has `read`, `write` and `undo`. For sublayers `f_1 .. f_N`, each with its
norm:

    state = ends.start(embedding)
    x, state = layer_l.read(state)
    state, residual_l = layer_l.write(state, f_l(x))        for l = 1 .. N
    h = ends.finish(state)

Between two sublayers the state keeps its structure, shapes and types, so that a `jax.lax.scan` can carry it. The state
that `read` returns for `write` may hold more. All parameters are in the two modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ldm_jax.options import check_option_types
from ldm_jax.sharding import Axis
from ldm_jax.typing import DType, Hidden


def at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The array in float32, in which controllers compute whatever the compute type; float64 stays."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MixerState(NamedTuple):
    """What is carried from sublayer to sublayer: pytrees of arrays."""

    stream: Any
    """What the reversible backward pass saves before every block. For PreLN and LDM it is `h`, `[B, T, D]`."""
    memory: Any = ()
    """What the reversible backward pass restores by `undo`."""


@runtime_checkable
class MixerLayer(Protocol):
    """One sublayer's part of a mixer."""

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The sublayer's input `[B, T, D]`, before its norm, and the state for `write`."""
        ...

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, Any]:
        """The state after the sublayer's output `[B, T, D]`, and what `undo` needs, a pytree of arrays."""
        ...

    def undo(self, memory: Any, residual: Any) -> Any:
        """The state's memory before a read and the write after it. Called only where the mixer is reversible."""
        ...


@runtime_checkable
class MixerEnds(Protocol):
    """What a mixer does before the first sublayer and after the last."""

    def start(self, embedding: Hidden) -> MixerState:
        """The state before the first sublayer."""
        ...

    def finish(self, state: MixerState) -> Hidden:
        """The input of the model's final norm, `[B, T, D]`."""
        ...


@dataclass(frozen=True)
class MixerOptions:
    """The options of a mixer, a table `[mixer.KIND]` of a config; and what the rest of the library asks of them."""

    def __post_init__(self) -> None:
        check_option_types(self)

    @property
    def irreversible(self) -> str | None:
        """Why the writes cannot be undone, as "WHAT cannot be undone: REASON"; None where they can."""
        return None

    def not_for_training_on(self, platform: str) -> str | None:
        """Why it should not train on a platform (`jax.default_backend()`), starting with the option; None: it can."""
        del platform
        return None

    @property
    def sharded_sizes(self) -> dict[str, tuple[Axis, int]]:
        """Options, by name, that are sizes of a sharded axis: the mesh must divide them."""
        return {}

    def check_width(self, width: int) -> None:
        """Raises ValueError unless the options fit a stream of this width."""

    def with_weights(self) -> "MixerOptions | None":
        """The same mixer, its layers with `weights(state)`: those of the sources of a read. None: there are none."""
        return None

    def source_names(self, sublayers: list[str]) -> list[str]:
        """What those weights are of: the embedding and the sublayers' outputs, unless the mixer has other sources."""
        return ["embedding", *sublayers]

    def training_numbers(self, sublayers: int) -> float:
        """A rough count of what training holds beyond the streams: float32 numbers per token and unit of width."""
        del sublayers
        return 0.0


class Stack(NamedTuple):
    """The stack of sublayers that a mixer joins."""

    width: int
    """D, of the stream."""
    sublayers: int
    """N: two for each block."""
    dtype: DType
    """The compute type."""
    scanned: bool
    """Whether a scan goes over the blocks, so that the state keeps its shape; otherwise it may grow."""


class Place(NamedTuple):
    """Where a sublayer is."""

    block: int | Array
    """Counted from 0; may be traced, because blocks are made by a `jax.vmap`."""
    last: bool
    """Whether it is its block's last sublayer, the MLP."""


class Mixer(NamedTuple):
    """A depth mixer: what its file declares and the registry lists."""

    kind: str
    """Its name, `mixer.kind` of a config."""
    options: type[MixerOptions]
    layer: Callable[[Any, Stack, Place, nnx.Rngs], MixerLayer]
    """`(options, stack, place, rngs)`: the part of one sublayer."""
    ends: Callable[[Any, Stack, nnx.Rngs], MixerEnds]
    """`(options, stack, rngs)`: the part before the first sublayer and after the last."""
