"""The interface of a depth mixer: how a sublayer's input is gathered from what came before, and its output kept.

A mixer is two modules. `MixerEnds` opens the stack with `start` and closes it with `finish`; one `MixerLayer` for each
sublayer (attention and MLP each count as one) has `read`, `write` and `undo`. For sublayers `f_1 .. f_N`, each with its
norm:

    state = ends.start(embedding)
    x, state = layer_l.read(state)
    state, kept_l = layer_l.write(state, f_l(x))        for l = 1 .. N
    h = ends.finish(state)

Between two sublayers the state has one structure, with the same shapes and types, so that a `jax.lax.scan` can carry
it. What `read` hands to `write` may be more. The two modules hold what is learned.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.typing import Hidden


def at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The array in float32, in which controllers compute whatever the compute type; float64 stays."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MixerState(NamedTuple):
    """What is carried from sublayer to sublayer: pytrees of arrays."""

    stream: Any
    """What a backward pass that undoes writes has saved before every block. PreLN's and LDM's is `h`, `[B, T, D]`."""
    memory: Any = ()
    """What such a backward pass gets back by `undo`."""


@runtime_checkable
class MixerLayer(Protocol):
    """One sublayer's part of a mixer."""

    def read(self, state: MixerState) -> tuple[Hidden, MixerState]:
        """The sublayer's input `[B, T, D]`, before its norm, and the state for `write`: often the same."""
        ...

    def write(self, state: MixerState, output: Hidden) -> tuple[MixerState, Any]:
        """The state that has taken in the sublayer's output `[B, T, D]`, and what `undo` needs, a pytree of arrays."""
        ...

    def undo(self, memory: Any, kept: Any) -> Any:
        """The state's memory before a write, from that after it. Called only if the mixer's options say it can be."""
        ...


@runtime_checkable
class MixerEnds(Protocol):
    """What a mixer does before the first sublayer and after the last."""

    def start(self, embedding: Hidden) -> MixerState:
        """The state before the first sublayer."""
        ...

    def finish(self, state: MixerState) -> Hidden:
        """What the model's final norm is given, `[B, T, D]`."""
        ...
