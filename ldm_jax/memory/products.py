"""The two products that a write and a read are made of, with derivatives that compile to the same two products.

What JAX derives by itself for a batch of small matrix-vector products is a batch of matrix products of inner dimension
1, which are written out before they are added to anything. Here the derivative by a matrix is an elementwise outer
product, which the compiler fuses into the sum that it belongs to; on a 2-core CPU that halves a write's backward pass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def apply_matrix(matrix: Float[Array, "rows columns"], vector: Float[Array, " columns"]) -> Float[Array, " rows"]:
    """`matrix vector`, with every bit of their type: TPUs and GPUs shorten float32 inputs unless told otherwise."""
    return jnp.matmul(matrix, vector, precision=jax.lax.Precision.HIGHEST)


@jax.custom_jvp
def outer(a: Float[Array, " rows"], b: Float[Array, " columns"]) -> Float[Array, "rows columns"]:
    """`a b'`."""
    return a[:, None] * b[None, :]


# Each tangent is written in the way whose transpose is the product that is wanted in a backward pass.


@apply_matrix.defjvp
def _apply_matrix_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    matrix, vector = primals
    d_matrix, d_vector = tangents
    return apply_matrix(matrix, vector), jnp.sum(d_matrix * vector, axis=-1) + apply_matrix(matrix, d_vector)


@outer.defjvp
def _outer_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    a, b = primals
    d_a, d_b = tangents
    product = lambda a, b: jnp.matmul(a[:, None], b[None, :], precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    return outer(a, b), product(d_a, b) + product(a, d_b)
