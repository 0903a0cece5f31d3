"""An append-only cache along depth: entries of earlier layers, read by later ones.

An append can be undone without a residual, so a reversible backward pass holds one cache instead of one per layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ByDepth = Sequence[Array] | Array
"""One array per entry: a sequence for a `GrowingCache`, a leading axis for a `StackedCache`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrowingCache:
    """Entries in a tuple that grows with every append: for layers applied by a Python loop."""

    entries: tuple[Any, ...] = ()

    def append(self, entry: Any) -> "GrowingCache":
        """Appends an entry, a pytree of arrays."""
        return GrowingCache((*self.entries, entry))

    def without_last(self) -> "GrowingCache":
        """Undoes the last append."""
        return GrowingCache(self.entries[:-1])

    def stacked(self, part: Callable[[Any], Array], unwritten: float) -> Float[Array, "N ..."]:
        """`part(entry)` of every entry, with a leading depth axis."""
        del unwritten  # every entry is written
        return jnp.stack([part(entry) for entry in self.entries])

    def each(self, function: Callable[..., Array], *by_depth: ByDepth, unwritten: float = 0.0) -> ByDepth:
        """`function(entry, ...)` for every entry."""
        del unwritten  # every entry is written
        return [function(entry, *others) for entry, *others in zip(self.entries, *by_depth, strict=True)]

    def weighted_sum(self, weights: ByDepth, part: Callable[[Any], Array]) -> Float[Array, "*shape width"]:
        """The sum over the entries of `weight[..., None] * part(entry)`, in the weights' type."""
        terms = self.each(lambda entry, weight: weight[..., None] * part(entry).astype(weight.dtype), weights)
        return sum(terms[1:], start=terms[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedCache:
    """Entries in arrays with a leading depth axis of fixed length, the first `count` of them written: for a scan."""

    entries: Any
    count: Any
    """`[]`, int32."""

    @classmethod
    def empty(cls, length: int, entry: Any) -> "StackedCache":
        """An empty cache for up to `length` entries with the shapes and types of `entry`."""
        room = jax.tree.map(lambda leaf: jnp.zeros((length, *jnp.shape(leaf)), jnp.result_type(leaf)), entry)
        return cls(room, jnp.zeros((), jnp.int32))

    def append(self, entry: Any, *, when: Any = True) -> "StackedCache":
        """Appends an entry if `when` is true. The cache must not be full, which is not checked."""
        put = lambda room, leaf: jax.lax.dynamic_update_index_in_dim(room, leaf.astype(room.dtype), self.count, 0)  # noqa: E731
        # Written also if `when` is false: entries past `count` are never read.
        return StackedCache(jax.tree.map(put, self.entries, entry), self.count + jnp.asarray(when, jnp.int32))

    def without_last(self, *, when: Any = True) -> "StackedCache":
        """Undoes an append with this `when`."""
        return StackedCache(self.entries, self.count - jnp.asarray(when, jnp.int32))

    def stacked(self, part: Callable[[Any], Array], unwritten: float) -> Float[Array, "N ..."]:
        """`part(entry)` of every entry, with a leading depth axis; `unwritten` for entries not yet written."""
        array = part(self.entries)
        return jnp.where(self._written(array), array, unwritten)

    def each(self, function: Callable[..., Array], *by_depth: ByDepth, unwritten: float = 0.0) -> ByDepth:
        """`function(entry, ...)` for every entry; `unwritten` for entries not yet written."""
        results = jax.vmap(function)(self.entries, *by_depth)
        return jnp.where(self._written(results), results, unwritten)

    def weighted_sum(self, weights: ByDepth, part: Callable[[Any], Array]) -> Float[Array, "*shape width"]:
        """The sum over the entries of `weight[..., None] * part(entry)`, in the weights' type.

        The weights of entries not yet written must be 0, as those from `each` are.
        """
        weights = jnp.asarray(weights)
        return jnp.sum(weights[..., None] * part(self.entries).astype(weights.dtype), axis=0)

    def _written(self, like: Array) -> Array:
        length = like.shape[0]
        return (jnp.arange(length, dtype=self.count.dtype) < self.count).reshape(length, *(1,) * (like.ndim - 1))


DepthCache = GrowingCache | StackedCache
