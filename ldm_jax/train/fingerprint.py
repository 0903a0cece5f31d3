"""A fingerprint of arrays, so that a checkpoint whose bytes have changed is known for damaged."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ldm_jax.sharding import constrain

_ODD = 2654435761  # an odd number: multiplying by it and one more than twice the place loses no bit


@jax.jit
def fingerprint(tree: Any) -> UInt32[Array, " leaves"]:
    """One number a leaf: the sum of its entries' bits, each times an odd number that depends on its place, mod 2^32.

    Whole numbers are summed, so it is the same on any number of devices and for any way to split an array over them. A
    change of a single entry always changes it, any other change but once in about 2^32 times.
    """
    return constrain(jnp.stack([_of_leaf(leaf) for leaf in jax.tree.leaves(tree)]), None)


def _of_leaf(leaf: Array) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32) if leaf.dtype.itemsize == 4 else leaf.astype(jnp.uint32)
    place, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    return jnp.sum(bits * (2 * (place * jnp.uint32(_ODD)) + 1), dtype=jnp.uint32)
