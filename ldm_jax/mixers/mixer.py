"""The interface of a depth mixer: how a sublayer's input is computed from earlier outputs, and its output stored.

A mixer consists of two kinds of modules. `MixerEnds` has `start` and `finish`, before the first sublayer and after the
last. A `MixerLayer` per sublayer (attention and MLP each count as one) has `read`, `write` and `undo`. For sublayers
`f_1` to `f_N`, norms included:

    state = ends.start(embedding)
    x, state = layer_l.read(state)
    state, residual_l = layer_l.write(state, f_l(x))        for l = 1 .. N
    h = ends.finish(state)

Between sublayers the state has the same structure, shapes and types, so that a `jax.lax.scan` can carry it. The state
that `read` returns for `write` may have another structure. All parameters are in these modules.
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
    """Casts an array to float32, in which coefficients are computed for every compute type. float64 is unchanged."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MixerState(NamedTuple):
    """The state carried from sublayer to sublayer: pytrees of arrays."""

    stream: Any
    """Saved before every block by the reversible backward pass. For PreLN and LDM it is `h`, `[B, T, D]`."""
    memory: Any = ()
    """Restored by `undo` in the reversible backward pass."""


@runtime_checkable
class MixerLayer(Protocol):
    """The part of a mixer for one sublayer."""

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The sublayer's input `[B, T, D]`, before its norm, and the state for `write`."""
        ...

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, Any]:
        """The state after the sublayer's output `[B, T, D]`, and the residual for `undo`, a pytree of arrays."""
        ...

    def undo(self, memory: Any, residual: Any) -> Any:
        """The state's memory before a read and the write that followed it. Only called if the mixer is reversible."""
        ...


@runtime_checkable
class MixerEnds(Protocol):
    """The part of a mixer before the first sublayer and after the last."""

    def start(self, embedding: Hidden) -> MixerState:
        """The state before the first sublayer."""
        ...

    def finish(self, state: MixerState) -> Hidden:
        """The input of the model's final norm, `[B, T, D]`."""
        ...


@dataclass(frozen=True)
class MixerOptions:
    """The options of a mixer, a table `[mixer.KIND]` of a config, and properties of the mixer that depend on them."""

    def __post_init__(self) -> None:
        check_option_types(self)

    @property
    def irreversible(self) -> str | None:
        """Why writes cannot be undone, as "WHAT cannot be undone: REASON"; None if the mixer is reversible."""
        return None

    def replacements_on(self, platform: str) -> dict[str, Any]:
        """Equivalent values for the options that a platform (`jax.default_backend()`) does not support, by name."""
        del platform
        return {}

    @property
    def sharded_sizes(self) -> dict[str, tuple[Axis, int]]:
        """The options, by name, that are sizes of a sharded axis, which the mesh must evenly divide."""
        return {}

    def check_width(self, width: int) -> None:
        """Raises ValueError unless the options fit a stream of this width."""

    def with_weights(self) -> "MixerOptions | None":
        """Equivalent options whose layers have `weights(state)`: those of a read's sources. None if none exist."""
        return None

    def source_names(self, sublayers: list[str]) -> list[str]:
        """The names of a read's sources, in the order of `weights`: the embedding and the outputs by default."""
        return ["embedding", *sublayers]

    def training_numbers(self, sublayers: int) -> float:
        """A rough estimate of training memory beyond the streams: float32 numbers per token and unit of width."""
        del sublayers
        return 0.0


class Stack(NamedTuple):
    """The shape and compute type of a stack of sublayers."""

    width: int
    """D."""
    sublayers: int
    """N: two per block."""
    dtype: DType
    """The compute type."""
    scanned: bool
    """Whether a scan carries the state over the blocks. Otherwise the state may grow."""


class Place(NamedTuple):
    """The position of a sublayer in the stack."""

    block: int | Array
    """The number of its block, counted from 0. It is traced when blocks are made by a `jax.vmap`."""
    last: bool
    """Whether it is the last sublayer of its block, the MLP."""


class Mixer(NamedTuple):
    """A depth mixer: declared in its file, listed in the registry."""

    kind: str
    """The name of the mixer: `mixer.kind` of a config."""
    options: type[MixerOptions]
    layer: Callable[[Any, Stack, Place, nnx.Rngs], MixerLayer]
    """`(options, stack, place, rngs) -> layer`."""
    ends: Callable[[Any, Stack, nnx.Rngs], MixerEnds]
    """`(options, stack, rngs) -> ends`."""
