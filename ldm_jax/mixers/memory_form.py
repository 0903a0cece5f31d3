"""Two forms of a depth memory, over tokens and groups: what is carried, and how it is read, written and undone.

recurrent: `M` and `P`; a read is `M q`. dual: `P` and the observations so far; a read is a weighted sum of their values
(`ldm_jax.memory.dual`). Both give the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax import memory
from ldm_jax.memory import rls, sqrt_rls
from ldm_jax.memory.depth_cache import ByDepth, DepthCache, GrowingCache, StackedCache
from ldm_jax.memory.dual import discounts
from ldm_jax.memory.products import apply_matrix, outer
from ldm_jax.mixers.depth_memory_config import DepthMemoryConfig, Form, Write


class Rule(NamedTuple):
    """What a regression's write does with the inverse covariance (or its factor), for one token and one group."""

    project_key: Callable[..., Any]
    next: Callable[..., Any]
    previous: Callable[..., Any]
    half_projected: Callable[..., Any] | None = None
    """Of the square root: what `previous` needs beside `u`."""


RULES = {
    Write.RLS: Rule(rls.project_key, rls.next_covariance, rls.previous_covariance),
    Write.SQRT_RLS: Rule(sqrt_rls.project_key, sqrt_rls.next_factor, sqrt_rls.previous_factor, sqrt_rls.half_projected),
}
WRITES = {
    Write.RLS: (memory.rls_write, memory.init_state),
    Write.SQRT_RLS: (memory.sqrt_rls_write, memory.sqrt_init_state),
    Write.ADDITIVE: (memory.additive_write, memory.init_state),
    Write.DELTA: (memory.delta_write, memory.init_state),
}


class MemoryState(NamedTuple):
    """`(M', P)` of every token and group, float32 whatever the compute type. V, the wide axis of `M`, is the last."""

    memory: Float[Array, "*tokens G K V"]
    inverse_covariance: Float[Array, "*tokens G K K"]
    """P; for the square root its factor S."""


class DualState(NamedTuple):
    """The inverse covariance, and the observations so far, their values in the compute type."""

    covariance: MemoryState
    """`M` of width 0, and P."""
    observations: DepthCache


AnyState = MemoryState | DualState


class Kept(NamedTuple):
    """What undoing a write needs beside the later state: the correction, and what it looks at of the observation."""

    correction: memory.Correction
    half_projected: Float[Array, "*tokens G K"] | None
    """`S'k`, of the square root."""
    importance: Float[Array, "*tokens G"]


@runtime_checkable
class MemoryForm(Protocol):
    """What both forms do."""

    def start(
        self, tokens: tuple[int, ...], groups: int, value_dim: int, key_dim: int, alpha: Any, dtype: Any = jnp.float32
    ) -> Any:
        """The state before the first write, float32; the dual form keeps values in `dtype`. `alpha`: `[]` or `[G]`."""
        ...

    def read(self, state: Any, query: Float[Array, "*tokens G K"], value_dim: int) -> Float[Array, "*tokens G V"]:
        """`M q` of every token and group, float32."""
        ...

    def write(self, state: Any, observation: memory.Observation) -> tuple[Any, Kept | None]:
        """The state after an observation of every token and group, and what `undo` needs."""
        ...

    def undo(self, state: Any, kept: Kept | None, forgetting: Float[Array, " G"]) -> Any:
        """The state before a write."""
        ...


@dataclass(frozen=True)
class Recurrent(MemoryForm):
    """Carries the memory."""

    kind: Write

    def start(
        self, tokens: tuple[int, ...], groups: int, value_dim: int, key_dim: int, alpha: Any, dtype: Any = jnp.float32
    ) -> MemoryState:
        """The state before the first write."""
        del dtype  # values are not kept
        init_one = lambda alpha: WRITES[self.kind][1](1, key_dim, alpha)[1]  # noqa: E731
        inverse_covariance = jax.vmap(init_one)(jnp.broadcast_to(alpha, (groups,)))
        return MemoryState(
            jnp.zeros((*tokens, groups, key_dim, value_dim), inverse_covariance.dtype),
            jnp.broadcast_to(inverse_covariance, (*tokens, groups, key_dim, key_dim)),
        )

    def read(
        self, state: MemoryState, query: Float[Array, "*tokens G K"], value_dim: int
    ) -> Float[Array, "*tokens G V"]:
        """`M q`, of width `value_dim`."""
        del value_dim  # the state's
        return _over(lambda m, q: memory.rls_read(m.T, q), query.ndim - 1)(state.memory, query)

    def write(self, state: MemoryState, observation: memory.Observation) -> tuple[MemoryState, Kept | None]:
        """The state after an observation of every token and group, and what `undo` needs."""
        axes = observation.key.ndim - 1
        if self.kind not in RULES:
            write, _ = WRITES[self.kind]
            after, inverse_covariance = _over(lambda m, p, o: write(m.T, p, o), axes)(*state, observation)
            return MemoryState(jnp.swapaxes(after, -1, -2), inverse_covariance), None
        rule = RULES[self.kind]

        # rls_write, but for M being transposed: a compiler does not see through transposing it twice.
        def write_one(m: Float[Array, "K V"], p: Float[Array, "K K"], o: memory.Observation) -> tuple[Any, ...]:
            o = memory.Observation(*(part.astype(m.dtype) for part in o))
            u, key_u = rule.project_key(p, o.key)
            s = o.forgetting + o.importance * key_u
            e = o.value - apply_matrix(m.T, o.key)
            half = None if rule.half_projected is None else rule.half_projected(p, o.key)
            kept = Kept(memory.Correction(e, u, s), half, o.importance)
            return m + outer((o.importance / s) * u, e), rule.next(p, u, s, o), kept

        m, p, kept = _over(write_one, axes)(*state, observation)
        return MemoryState(m, p), kept

    def undo(self, state: MemoryState, kept: Kept | None, forgetting: Float[Array, " G"]) -> MemoryState:
        """The state before a write."""
        if kept is None:
            raise ValueError(f"the write {self.kind} can't be undone: take backward = remat or stored.")
        rule = RULES[self.kind]

        def undo_one(
            m: Float[Array, "K V"], p: Float[Array, "K K"], kept: Kept, forgetting: Float[Array, ""]
        ) -> tuple[Array, Array]:
            (e, u, s), half, importance = kept
            projections = (u,) if half is None else (u, half)
            observation = memory.Observation(u, e, forgetting, importance)  # its key and value are not looked at
            return m - outer((importance / s) * u, e), rule.previous(p, *projections, s, observation)

        shape = kept.importance.shape
        return MemoryState(*_over(undo_one, len(shape))(*state, kept, jnp.broadcast_to(forgetting, shape)))


@dataclass(frozen=True)
class Dual(MemoryForm):
    """Carries the inverse covariance and a cache of observations; has the memory's numbers without the memory."""

    kind: Write
    depth: int | None = None
    """Observations that there will be, for a scan; None: the cache grows."""

    def start(
        self, tokens: tuple[int, ...], groups: int, value_dim: int, key_dim: int, alpha: Any, dtype: Any = jnp.float32
    ) -> DualState:
        """The state before the first write; values are kept in this type."""
        cache = GrowingCache()
        if self.depth is not None:
            each = jnp.zeros((*tokens, groups, key_dim)), jnp.zeros((*tokens, groups, value_dim), dtype)
            entry = memory.Observation(*each, jnp.ones((groups,)), jnp.zeros((*tokens, groups)))
            cache = StackedCache.empty(self.depth, entry)
        return DualState(Recurrent(self.kind).start(tokens, groups, 0, key_dim, alpha), cache)

    def weights(self, state: DualState, query: Float[Array, "*tokens G K"]) -> ByDepth:
        """The weight of every observation in a read, each `[*tokens, G]`; 0 where there is none yet."""
        left = discounts(state.observations.stacked(lambda entry: entry.forgetting, 1.0))
        projected = query
        if self.kind in RULES:
            project = RULES[self.kind].project_key
            projected, _ = _over(project, query.ndim - 1)(state.covariance.inverse_covariance, query)

        def weight(entry: memory.Observation, left: Float[Array, " G"]) -> Float[Array, "*tokens G"]:
            return left * entry.importance * jnp.sum(entry.key * projected, axis=-1)

        return state.observations.each(weight, left)

    def read(self, state: DualState, query: Float[Array, "*tokens G K"], value_dim: int) -> Float[Array, "*tokens G V"]:
        """`sum_i c_i v_i`, of width `value_dim`, summed in float32; 0 before the first write."""
        if isinstance(state.observations, GrowingCache) and not state.observations.entries:
            return jnp.zeros((*query.shape[:-1], value_dim), query.dtype)
        total = state.observations.weighted_sum(self.weights(state, query), lambda entry: entry.value)
        # Fused with what follows, a TPU would write out every weight, broadcast to the width of its value.
        return jax.lax.optimization_barrier(total)

    def write(self, state: DualState, observation: memory.Observation) -> tuple[DualState, Kept | None]:
        """The state after an observation of every token and group, and what `undo` needs."""
        key, value, forgetting, importance = observation
        covariance, kept = Recurrent(self.kind).write(state.covariance, observation._replace(value=value[..., :0]))
        shared = forgetting.reshape(-1, forgetting.shape[-1])[0]  # the same for all tokens
        entry = memory.Observation(key, value, shared, importance)
        return DualState(covariance, state.observations.append(entry)), kept

    def undo(self, state: DualState, kept: Kept | None, forgetting: Float[Array, " G"]) -> DualState:
        """The state before a write."""
        covariance = state.covariance
        if kept is not None:
            covariance = Recurrent(self.kind).undo(covariance, kept, forgetting)
        return DualState(covariance, state.observations.without_last())


def make_form(config: DepthMemoryConfig, depth: int | None = None) -> MemoryForm:
    """The form that the options ask for; of the dual one, for a scan over that many observations."""
    if config.form is Form.FUSED:
        raise ValueError(
            "form is fused, which puts a write off until the next read: only the mixer ldm of a model does that. Here "
            "set form to recurrent, or call ldm_jax.memory.write_read."
        )
    return Dual(config.write, depth) if config.form is Form.DUAL else Recurrent(config.write)


def check_memory(state: AnyState, x: Float[Array, "*tokens D"], config: DepthMemoryConfig) -> None:
    """Raises ValueError unless the state is the one of these tokens, this width and these options."""
    dual = config.form is Form.DUAL
    width = 0 if dual else x.shape[-1] // config.groups
    expected = (*x.shape[:-1], config.groups, config.key_dim, width)
    if isinstance(state, DualState) != dual:
        found = "of the other form"
    else:
        shape = (state.covariance if isinstance(state, DualState) else state).memory.shape
        found = f"of shape {shape}" if shape != expected else None
    if found is not None:
        raise ValueError(
            f"the memory is {found}, but for tokens {x.shape[:-1]} of width {x.shape[-1]} it must be {config.form} and "
            f"have {expected}: start it with init_memory(h.shape[:-1], width, config), the config of the DepthMemory."
        )


def _over(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """`jax.vmap` over that many leading axes."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function
