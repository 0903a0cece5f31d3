"""The products that a write and a read are made of, with derivatives that compile to the same products.

What JAX derives for a batch of small matrix-vector products is a batch of matrix products of inner dimension 1, which
are written to memory before they are added to anything. Here every tangent is written so that its transpose is an
elementwise outer product, which the compiler fuses into the sum that it belongs to, and so that nothing of a matrix's
size is saved for the backward pass but the matrix itself.

All products carry `precision=HIGHEST`: TPUs and GPUs round float32 inputs of a product unless told otherwise.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _matmul(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@jax.custom_jvp
def combine(weights: Float[Array, " K"], rows: Float[Array, "K V"]) -> Float[Array, " V"]:
    """`sum_i weights_i rows_i`: a memory `M'` read by a query."""
    return _matmul(weights, rows)


@combine.defjvp
def _combine_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    weights, rows = primals
    d_weights, d_rows = tangents
    return combine(weights, rows), combine(d_weights, rows) + jnp.sum(weights[:, None] * d_rows, axis=0)


@jax.custom_jvp
def outer(a: Float[Array, " K"], b: Float[Array, " V"]) -> Float[Array, "K V"]:
    """`a b'`."""
    return a[:, None] * b[None, :]


@outer.defjvp
def _outer_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    a, b = primals
    d_a, d_b = tangents
    return outer(a, b), _column_times_row(d_a, b) + _column_times_row(a, d_b)


@jax.custom_jvp
def apply_symmetric(matrix: Float[Array, "K K"], vector: Float[Array, " K"]) -> Float[Array, " K"]:
    """`P k` of a symmetric `P`, whose cotangent is `(y k' + k y') / 2`, symmetric to the bit.

    With the plain cotangent `y k'` an antisymmetric part would accumulate on the way back through the writes.
    """
    return _matmul(matrix, vector)


@apply_symmetric.defjvp
def _apply_symmetric_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    matrix, vector = primals
    d_matrix, d_vector = tangents
    by_matrix = jnp.sum(d_matrix * vector, axis=-1) + jnp.sum(d_matrix * vector[:, None], axis=0)
    return apply_symmetric(matrix, vector), by_matrix / 2 + apply_symmetric(matrix, d_vector)


@jax.custom_jvp
def scaled_square(scale: Float[Array, ""], vector: Float[Array, " K"]) -> Float[Array, "K K"]:
    """`g u u'`, symmetric to the bit: `(g u) u'` is not, and writes of it diverge."""
    return scale * (vector[:, None] * vector[None, :])


@scaled_square.defjvp
def _scaled_square_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    g, u = primals
    d_g, d_u = tangents
    return scaled_square(g, u), _column_times_row(d_g * u + g * d_u, u) + _column_times_row(g * u, d_u)


def _column_times_row(a: Float[Array, " K"], b: Float[Array, " V"]) -> Float[Array, "K V"]:
    # As a product and not elementwise: its transpose is then a matrix-vector product.
    return _matmul(a[:, None], b[None, :])
