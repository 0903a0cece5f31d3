"""Matrix-vector products and outer products with custom derivatives, of which writes and reads consist.

JAX's derivative of a batch of small matrix-vector products is a batch of matmuls with inner dimension 1, whose results
are materialised before they are accumulated. Here the tangents are written such that their transposes are elementwise
outer products, which XLA fuses into the accumulation, and such that no array of the matrix's size except the matrix is
saved for the backward pass.

All matmuls use `precision=HIGHEST`, because TPUs and GPUs round float32 operands by default.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _matmul(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@jax.custom_jvp
def combine(weights: Float[Array, " K"], rows: Float[Array, "K V"]) -> Float[Array, " V"]:
    """`sum_i weights_i rows_i`, such as a read of the memory `M'` with a query as weights."""
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


def symmetric(matrix: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """`(P + P') / 2`: changes no bit of a symmetric `P`, and makes its cotangent symmetric.

    Every write applies it. Rounding makes cotangents slightly asymmetric (even `a b + b a`, if fused). The
    antisymmetric part would grow in the backward pass, and make the gradients of the keys meaningless.
    """
    return (matrix + matrix.T) / 2


@jax.custom_jvp
def scaled_square(scale: Float[Array, ""], vector: Float[Array, " K"]) -> Float[Array, "K K"]:
    """`g (u u')`, symmetric to the bit. `(g u) u'` is not, and writes that use it diverge."""
    return scale * (vector[:, None] * vector[None, :])


@scaled_square.defjvp
def _scaled_square_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    g, u = primals
    d_g, d_u = tangents
    return scaled_square(g, u), _column_times_row(d_g * u + g * d_u, u) + _column_times_row(g * u, d_u)


def _column_times_row(a: Float[Array, " K"], b: Float[Array, " V"]) -> Float[Array, "K V"]:
    # A matmul instead of an elementwise product, so that its transpose is a matrix-vector product.
    return _matmul(a[:, None], b[None, :])
