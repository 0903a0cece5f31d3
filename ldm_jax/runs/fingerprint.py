"""Fingerprints of arrays, by which a checkpoint is verified."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from ldm_jax.sharding import constrain

PART_SIZE = 2**22
"""Entries whose fingerprint is computed at a time."""


def fingerprint(tree: Any) -> UInt32[np.ndarray, " leaves"]:
    """A number for each leaf: the sum of its entries' bits, each times an odd number that depends on its index.

    The sum is of integers modulo 2^32, so it does not depend on the number of devices or on the sharding. A change of a
    single entry always changes it; any other change is missed with a probability of about 2^-32.
    """
    leaves = jax.tree.leaves(tree)
    # The temporary arrays of a sum are as large as what is summed, so large leaves are summed in parts.
    rows = [max(leaf.shape[0] * PART_SIZE // leaf.size, 1) if _is_large(leaf) else 0 for leaf in leaves]
    numbers = np.zeros(len(leaves), np.uint32)
    if small := [leaf for leaf, count in zip(leaves, rows, strict=True) if not count]:
        numbers[np.array(rows) == 0] = np.asarray(_fingerprints(small))
    for place in np.flatnonzero(rows):
        leaf, count = leaves[place], rows[place]
        for start in range(0, leaf.shape[0], count):
            part = _part_fingerprint(leaf, jnp.uint32(start), min(count, leaf.shape[0] - start))
            numbers[place : place + 1] += np.asarray(part)[None]
    return numbers


def _is_large(leaf: Array) -> bool:
    """Whether a leaf is large, and its first axis is not sharded, so that it can be cut without communication."""
    return leaf.size > PART_SIZE and leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0]


@jax.jit
def _fingerprints(leaves: list[Array]) -> UInt32[Array, " leaves"]:
    return constrain(jnp.stack([_leaf_fingerprint(leaf) for leaf in leaves]), None)


@functools.partial(jax.jit, static_argnames="rows")
def _part_fingerprint(leaf: Array, start: UInt32[Array, ""], rows: int) -> UInt32[Array, ""]:
    """The part of a leaf's number that comes from some of its rows."""
    part = jax.lax.dynamic_slice_in_dim(leaf, start, rows)
    return constrain(_leaf_fingerprint(part, start * jnp.uint32(leaf[0].size % 2**32)))


def _leaf_fingerprint(leaf: Array, start: UInt32[Array, ""] | int = 0) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32) if leaf.dtype.itemsize == 4 else leaf.astype(jnp.uint32)
    index, stride = jnp.full(leaf.shape, start, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    # Odd factors: multiplication by one is invertible modulo 2^32, so that no bit is lost.
    return jnp.sum(bits * (2 * (index * jnp.uint32(2654435761)) + 1), dtype=jnp.uint32)
