"""What earlier layers have left for later ones: an append-only cache along depth.

Undoing an append needs nothing that was saved, so a backward pass that walks down the layers keeps one cache and not
one for each layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ByDepth = Sequence[Array] | Array
"""One array for each entry: a sequence from a `GrowingCache`, a leading axis from a `StackedCache`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrowingCache:
    """Entries as a tuple that grows: for layers applied by a Python loop. Nothing but what was written is read."""

    entries: tuple[Any, ...] = ()

    def append(self, entry: Any) -> "GrowingCache":
        """The cache with one more entry, a pytree of arrays."""
        return GrowingCache((*self.entries, entry))

    def without_last(self) -> "GrowingCache":
        """The cache before the last append."""
        return GrowingCache(self.entries[:-1])

    def stacked(self, part: Callable[[Any], Array], unwritten: float) -> Float[Array, "N ..."]:
        """A part of every entry, with a leading depth axis."""
        del unwritten  # there is none here
        return jnp.stack([part(entry) for entry in self.entries])

    def each(self, function: Callable[..., Array], *by_depth: ByDepth, unwritten: float = 0.0) -> ByDepth:
        """`function(entry, ...)` of every entry."""
        del unwritten  # there is none here
        return [function(entry, *others) for entry, *others in zip(self.entries, *by_depth, strict=True)]

    def weighted_sum(self, weights: ByDepth, part: Callable[[Any], Array]) -> Float[Array, "*shape width"]:
        """The sum over the entries of `weight[..., None] * part(entry)`, in the weights' type."""
        terms = self.each(lambda entry, weight: weight[..., None] * part(entry).astype(weight.dtype), weights)
        return sum(terms[1:], start=terms[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedCache:
    """Entries with a leading depth axis of fixed length, of which the first `count` were written: for a scan."""

    entries: Any
    count: Any
    """`[]`, int32."""

    @classmethod
    def empty(cls, length: int, entry: Any) -> "StackedCache":
        """Room for `length` entries of the shapes and types of this one."""
        room = jax.tree.map(lambda leaf: jnp.zeros((length, *jnp.shape(leaf)), jnp.result_type(leaf)), entry)
        return cls(room, jnp.zeros((), jnp.int32))

    def append(self, entry: Any, *, when: Any = True) -> "StackedCache":
        """The cache with one more entry, if `when`. More than its length are not kept; that is not checked."""
        put = lambda room, leaf: jax.lax.dynamic_update_index_in_dim(room, leaf.astype(room.dtype), self.count, 0)  # noqa: E731
        # What lies past `count` is never looked at, so it may lie there.
        return StackedCache(jax.tree.map(put, self.entries, entry), self.count + jnp.asarray(when, jnp.int32))

    def without_last(self, *, when: Any = True) -> "StackedCache":
        """The cache before an append with this `when`."""
        return StackedCache(self.entries, self.count - jnp.asarray(when, jnp.int32))

    def stacked(self, part: Callable[[Any], Array], unwritten: float) -> Float[Array, "N ..."]:
        """A part of every entry, with a leading depth axis; `unwritten` where there is no entry yet."""
        array = part(self.entries)
        return jnp.where(self._written(array), array, unwritten)

    def each(self, function: Callable[..., Array], *by_depth: ByDepth, unwritten: float = 0.0) -> ByDepth:
        """`function(entry, ...)` of every entry, `unwritten` where there is none yet."""
        results = jax.vmap(function)(self.entries, *by_depth)
        return jnp.where(self._written(results), results, unwritten)

    def weighted_sum(self, weights: ByDepth, part: Callable[[Any], Array]) -> Float[Array, "*shape width"]:
        """The sum over the entries of `weight[..., None] * part(entry)`, in the weights' type.

        The weights must be 0 where there is no entry yet, as those from `each` are.
        """
        weights = jnp.asarray(weights)
        return jnp.sum(weights[..., None] * part(self.entries).astype(weights.dtype), axis=0)

    def _written(self, like: Array) -> Array:
        length = like.shape[0]
        return (jnp.arange(length, dtype=self.count.dtype) < self.count).reshape(length, *(1,) * (like.ndim - 1))


DepthCache = GrowingCache | StackedCache
