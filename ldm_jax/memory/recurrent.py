"""The interface of a form, and the recurrent form, which carries the memory.

A form represents the memories of all tokens and groups between layers. There are three: `Recurrent`, `dual.Dual` and
`fused.Fused`. They compute the same reads. Arrays are `[*tokens, G, ...]`; a form is a `jax.vmap` of a `WriteRule`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.memory import write
from ldm_jax.memory.observation import Observation
from ldm_jax.memory.write import Covariance, MemoryState, WriteRule

Alpha = float | Float[Array, ""] | Float[Array, " G"]
"""Inverse of the ridge: one for all groups, or one per group."""


class MemoryShape(NamedTuple):
    """The shape of one token's memory."""

    groups: int
    """G."""
    value_dim: int
    """V."""
    key_dim: int
    """K."""


@runtime_checkable
class MemoryForm(Protocol):
    """A form of a depth memory."""

    def start(self, tokens: tuple[int, ...], alpha: Alpha, first: Observation | None = None) -> Any:
        """The float32 state before the first write, or after the write of observation 0 if `first` is given."""
        ...

    def read(self, state: Any, query: Float[Array, "*tokens G K"]) -> tuple[Float[Array, "*tokens G V"], Any]:
        """`M q` of every token and group, and the state after the read, which differs if the form defers writes."""
        ...

    def write(self, state: Any, observation: Observation) -> tuple[Any, Any]:
        """The state after an observation of every token and group, and the residual for `undo`."""
        ...

    def undo(self, state: Any, residual: Any) -> Any:
        """The state before a read and the write that followed it, from the state after the write."""
        ...


def over_tokens(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """`jax.vmap` over the leading `axes` axes."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


@dataclass(frozen=True)
class Recurrent:
    """The recurrent form: carries `M'` and the covariance, a `MemoryState` with leading axes `[*tokens, G]`."""

    rule: WriteRule
    shape: MemoryShape

    def start(self, tokens: tuple[int, ...], alpha: Alpha, first: Observation | None = None) -> MemoryState:
        """The state before the first write, or after the write of observation 0."""
        _, value_dim, key_dim = self.shape
        start = lambda alpha: self.rule.start(value_dim, key_dim, alpha, jnp.float32)  # noqa: E731
        state = start_everywhere(start, tokens, self.shape.groups, alpha)
        return state if first is None else self.write(state, first)[0]

    def read(
        self, state: MemoryState, query: Float[Array, "*tokens G K"]
    ) -> tuple[Float[Array, "*tokens G V"], MemoryState]:
        """`M q`. The state is unchanged."""
        return over_tokens(write.read, query.ndim - 1)(state, query), state

    def write(self, state: MemoryState, observation: Observation) -> tuple[MemoryState, Any]:
        """The state after an observation, and its residual."""
        observation = observation.astype(state.memory.dtype)
        return over_tokens(self.rule.write, observation.importance.ndim)(state, observation)

    def undo(self, state: MemoryState, residual: Any) -> MemoryState:
        """The state before a write."""
        if self.rule.undo is None:
            raise ValueError("the writes additive and delta cannot be undone: set backward to remat or stored.")
        return over_tokens(self.rule.undo, residual.gain.size.ndim)(state, residual)


def start_everywhere(start: Callable[[Any], Any], tokens: tuple[int, ...], groups: int, alpha: Alpha) -> Any:
    """`start(alpha)` for every token and group, in float32."""
    state = jax.vmap(start)(jnp.broadcast_to(jnp.asarray(alpha, jnp.float32), (groups,)))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*tokens, *leaf.shape)), state)


def start_covariance(rule: WriteRule, shape: MemoryShape, tokens: tuple[int, ...], alpha: Alpha) -> Covariance | None:
    """The covariance of every token and group before the first observation; None for writes without a covariance."""
    parts = rule.covariance
    if parts is None:
        return None
    start = lambda alpha: parts.start(shape.key_dim, alpha, jnp.float32)  # noqa: E731
    return start_everywhere(start, tokens, shape.groups, alpha)


def observe_keys(rule: WriteRule, covariance: Covariance, observation: Observation) -> tuple[Covariance, write.Gain]:
    """The covariance after an observation of every token and group, and the gain. The values are not used."""
    parts = rule.covariance
    assert parts is not None

    def one(covariance: Covariance, key: Array, forgetting: Array, importance: Array) -> tuple[Any, Any]:
        gain = parts.gain(covariance, Observation(key, key[:0], forgetting, importance))
        return parts.advance(covariance, gain, forgetting), gain

    key, _, forgetting, importance = observation.astype(covariance.matrix.dtype)
    return over_tokens(one, importance.ndim)(covariance, key, forgetting, importance)
