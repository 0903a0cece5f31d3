"""The Pallas TPU kernels of `ldm_jax.memory.fused`, forward and backward.

A block has M `[K, tokens, V]`, keys `[1, K, tokens]` and values `[tokens, V]` of one group. It is computed in VMEM: `M`
is read from HBM once and written back once, in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

BLOCK_TOKENS = 128
"""The number of lanes of a TPU's vector register. Tokens are along the lanes in keys."""


def write_read_kernel(
    m: Array, key: Array, gain: Array, value: Array, query: Array, *, in_place: bool = True, interpret: bool = False
) -> tuple[Array, ...]:
    """`fused.write_read` with M `[K, tokens, D]`, keys `[G, K, tokens]` and values `[tokens, D]`."""

    def body(m: Any, key: Any, gain: Any, value: Any, query: Any, after: Any, error: Any, readout: Any) -> None:
        k, g, q = map(_columns, (key, gain, query))
        e = value[...].astype(m.dtype) - _combine(k, m)
        y = jnp.zeros_like(e)
        for i in range(len(k)):
            row = m[i] + g[i] * e
            after[i] = row
            y += q[i] * row
        error[...] = e
        readout[...] = y.astype(readout.dtype)

    by_memory, by_key, by_value = _blocks(m, key)
    return _call(
        body,
        (m, key, gain, value, query),
        in_specs=(by_memory, by_key, by_key, by_value, by_key),
        out_specs=(by_memory, by_value, by_value),
        out_shape=(_like(m), jax.ShapeDtypeStruct(value.shape, m.dtype), _like(value)),
        input_output_aliases={0: 0} if in_place else {},
        interpret=interpret,
    )


def undo_kernel(m: Array, key: Array, gain: Array, error: Array, *, interpret: bool = False) -> tuple[Array, ...]:
    """`fused.undo_write` with M `[K, tokens, D]`, keys `[G, K, tokens]` and errors `[tokens, D]`."""

    def body(m: Any, key: Any, gain: Any, error: Any, before: Any, value: Any) -> None:
        k, g, e = _columns(key), _columns(gain), error[...]
        v = e
        for i in range(len(k)):
            row = m[i] - g[i] * e
            before[i] = row
            v += k[i] * row
        value[...] = v

    by_memory, by_key, by_value = _blocks(m, key)
    return _call(
        body,
        (m, key, gain, error),
        in_specs=(by_memory, by_key, by_key, by_value),
        out_specs=(by_memory, by_value),
        out_shape=(_like(m), _like(error)),
        input_output_aliases={0: 0},
        interpret=interpret,
    )


def pull_kernel(
    m: Array,
    key: Array,
    gain: Array,
    query: Array,
    error: Array,
    of_after: Array,
    of_readout: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """The cotangents of M, key, gain, value and query, given those of M after the write and of the readout."""

    def body(*refs: Any) -> None:
        m, key, gain, query, error, of_after, of_readout, of_before, of_key, of_gain, of_value, of_query = refs
        k, g, q = map(_columns, (key, gain, query))
        e, of_y = error[...], of_readout[...].astype(m.dtype)
        of_rows = [of_after[i] + q[i] * of_y for i in range(len(k))]
        of_e = _combine(g, of_rows)
        for i in range(len(k)):
            of_before[i] = of_rows[i] - k[i] * of_e
        _store_sums(of_key, [-m[i] * of_e for i in range(len(k))])
        _store_sums(of_gain, [of_rows[i] * e for i in range(len(k))])
        _store_sums(of_query, [(m[i] + g[i] * e) * of_y for i in range(len(k))])
        of_value[...] = of_e.astype(of_value.dtype)

    by_memory, by_key, by_value = _blocks(m, key)
    return _call(
        body,
        (m, key, gain, query, error, of_after, of_readout),
        in_specs=(by_memory, by_key, by_key, by_key, by_value, by_memory, by_value),
        out_specs=(by_memory, by_key, by_key, by_value, by_key),
        out_shape=(_like(m), _like(key), _like(key), _like(of_readout), _like(key)),
        input_output_aliases={5: 0},
        interpret=interpret,
    )


def _columns(key: Any) -> list[Array]:
    """Each of the K entries of the keys as a column `[tokens, 1]`, which broadcasts over V."""
    by_token = key[0].T
    return [by_token[:, i : i + 1] for i in range(by_token.shape[1])]


def _combine(columns: list[Array], rows: Any) -> Array:
    """`sum_i columns[i] rows[i]`."""
    return functools.reduce(jnp.add, (column * rows[i] for i, column in enumerate(columns)))


def _store_sums(out: Any, terms: list[Array]) -> None:
    """Stores the sum over V of each of the K terms `[tokens, V]` as an entry of the keys."""
    tokens = terms[0].shape[0]
    entry = jax.lax.broadcasted_iota(jnp.int32, (tokens, len(terms)), 1)
    by_token = jnp.zeros(entry.shape, out.dtype)
    for i, term in enumerate(terms):
        by_token = jnp.where(entry == i, jnp.sum(term, axis=1, keepdims=True), by_token)
    out[0] = by_token.T


def _blocks(m: Array, key: Array) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The block specs of arrays like M, like keys and like values, on a grid of (blocks of tokens, groups)."""
    (key_dim, tokens, width), groups = m.shape, len(key)
    block = min(BLOCK_TOKENS, tokens)
    return (
        pl.BlockSpec((key_dim, block, width // groups), lambda t, g: (0, t, g)),
        pl.BlockSpec((1, key_dim, block), lambda t, g: (g, 0, t)),
        pl.BlockSpec((block, width // groups), lambda t, g: (t, g)),
    )


def _call(body: Callable[..., None], inputs: tuple[Array, ...], *, out_shape: Any, **options: Any) -> tuple[Array, ...]:
    m, key = inputs[:2]
    grid = pl.cdiv(m.shape[1], BLOCK_TOKENS), len(key)
    # XLA cannot see into the kernel. Operands and results are moved once.
    moved = sum(x.size * x.dtype.itemsize for x in (*inputs, *out_shape))
    cost = pl.CostEstimate(flops=2 * len(inputs) * m.size, bytes_accessed=moved, transcendentals=0)
    # XLA's default limit of 16 MiB of VMEM is enough for the buffers of blocks with K V = 2048.
    scale = max(1.0, len(m) * m.shape[-1] / len(key) / 2048)
    params = pltpu.CompilerParams(vmem_limit_bytes=int(scale * 2**24))
    run = pl.pallas_call(body, out_shape=out_shape, grid=grid, cost_estimate=cost, compiler_params=params, **options)
    return tuple(run(*inputs))


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
