"""The fused write and read equal separate ones in values and gradients, as a kernel and in plain JAX."""

import importlib.util
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import relative
from ldm_jax import Observation, rls_correction, rls_read, rls_write
from ldm_jax.memory import undo_write, write_read

GROUPS, WIDTH = 2, 256
each_implementation = pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernel"])


def separate(memory, covariance, key, value, importance, query):
    """M after the write, and the readout, by `rls_write` and `rls_read` for every token and group."""

    def one(m, p, k, v, beta, q):
        m, _ = rls_write(m, p, Observation(k, v, jnp.asarray(0.9, m.dtype), beta))
        return m, rls_read(m, q)

    tokens, width = value.shape
    groups = key.shape[1]
    m = memory.reshape(len(memory), tokens, groups, -1).transpose(1, 2, 3, 0)
    m, y = jax.vmap(jax.vmap(one))(m, covariance, key, value.reshape(tokens, groups, -1), importance, query)
    return m.transpose(3, 0, 1, 2).reshape(len(memory), tokens, width), y.reshape(tokens, width)


def fused(interpret, memory, covariance, key, value, importance, query):
    def gain(p, k, beta):
        observation = Observation(k, jnp.zeros(1, k.dtype), jnp.asarray(0.9, k.dtype), beta)
        _, u, s = rls_correction(jnp.zeros((1, len(k)), k.dtype), p, observation)
        return beta / s * u

    gains = jax.vmap(jax.vmap(gain))(covariance, key, importance)
    after, _, readout = write_read(memory, key, gains, value, query, interpret=interpret)
    return after, readout


def random_arguments(rng, tokens, key_dim):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    root = draw(tokens, GROUPS, key_dim, key_dim)
    importance = jnp.asarray(rng.choice([0.0, 1.0, 1e3], size=(tokens, GROUPS)))
    arguments = draw(key_dim, tokens, WIDTH), root @ root.swapaxes(-1, -2), draw(tokens, GROUPS, key_dim)
    return *arguments, draw(tokens, WIDTH), importance, draw(tokens, GROUPS, key_dim)


@each_implementation
@pytest.mark.parametrize(("tokens", "key_dim"), [(1, 1), (130, 3)])  # 130: the second block of tokens is not full
def test_equals_write_then_read_with_gradients(rng, x64, interpret, tokens, key_dim):
    arguments = random_arguments(rng, tokens, key_dim)
    weights = jnp.asarray(rng.normal(size=(key_dim + 1, tokens, WIDTH)))

    def run(function):
        def loss(*arguments):
            memory, readout = function(*arguments)
            return jnp.sum(weights[:-1] * memory) + jnp.sum(weights[-1] * readout), (memory, readout)

        return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(6)), has_aux=True))(*arguments)

    (_, expected), expected_grads = run(separate)
    (_, actual), grads = run(partial(fused, interpret))
    for a, b in zip((*actual, *grads), (*expected, *expected_grads), strict=True):
        # With importance 1000, gradients of 1e-3 of the largest are differences of terms of its size.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * float(jnp.abs(b).max()))


@each_implementation
def test_undo_restores_memory_and_value(rng, x64, interpret):
    memory, _, key, value, _, query = random_arguments(rng, 5, 3)
    after, error, _ = write_read(memory, key, query, value, query, interpret=interpret)
    before, restored_value = undo_write(after, key, query, error, interpret=interpret)
    # A few roundings of the largest memory after the write.
    scale = float(jnp.abs(after).max())
    assert relative(before, memory, scale) < 1e-14
    assert relative(restored_value, value, scale) < 1e-13


@each_implementation
def test_shapes_and_types_are_checked(rng, unchecked_annotations, interpret):
    m, _, k, v, _, q = (x.astype(jnp.float32) for x in random_arguments(rng, 5, 2))
    for wrong in (k[:, :1], k[..., :1], k[:1], k[0], k[None]):
        with pytest.raises(ValueError, match=r"query.*\[\*tokens, G, K\] with tokens \(5,\), K 2"):
            write_read(m, k, k, v, wrong, interpret=interpret)
        with pytest.raises(ValueError, match="gain"):
            undo_write(m, k, wrong, v, interpret=interpret)
    for memory, value in ((jnp.moveaxis(m, 0, 1), v), (m, v[:, :128]), (m, v[:, :1]), (m[:, :1], v)):
        with pytest.raises(ValueError, match=r"memory.*\[K, \*tokens, D\] and \[\*tokens, D\]"):
            write_read(memory, k, k, value, q, interpret=interpret)
    with pytest.raises(TypeError, match="value is int32"):
        write_read(m, k, k, v.astype(jnp.int32), q, interpret=interpret)
    after, error, readout = write_read(m[:, :0], k[:0], k[:0], v[:0], q[:0], interpret=interpret)
    assert (after.shape, error.shape, readout.shape) == ((2, 0, WIDTH), (0, WIDTH), (0, WIDTH))


@each_implementation
def test_leading_axes_types_and_transformations(rng, interpret):
    memory, _, key, value, _, query = (x.astype(jnp.float32) for x in random_arguments(rng, 6, 2))
    value = value.astype(jnp.bfloat16)
    run = jax.jit(lambda m, k, v, q: write_read(m, k, k, v, q, interpret=interpret))
    after, error, readout = run(memory, key, value, query)
    assert (after.dtype, error.dtype, readout.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    folded = run(*(x.reshape(*x.shape[:axis], 2, 3, *x.shape[axis + 1 :]) for axis, x in
                   ((1, memory), (0, key), (0, value), (0, query))))  # fmt: skip
    # A rounding or two: other shapes may be compiled with other fused multiply-adds.
    assert relative(folded[0].reshape(after.shape), after) < 5e-7
    mapped = jax.jit(jax.vmap(run, in_axes=(1, 0, 0, 0), out_axes=(1, 0, 0)))(
        memory[:, :, None], key[:, None], value[:, None], query[:, None]
    )
    assert relative(mapped[0][:, :, 0], after) < 5e-7
    assert relative(mapped[2][:, 0].astype(jnp.float32), readout.astype(jnp.float32)) < 2**-7  # bfloat16 has 8 bits
    of_value = jax.eval_shape(jax.grad(lambda v: jnp.sum(run(memory, key, v, query)[2].astype(jnp.float32))), value)
    assert of_value.dtype == jnp.bfloat16
    low = jax.eval_shape(jax.grad(lambda k: jnp.sum(run(memory, k, value, query)[0])), key.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype"), [(3, 128, "float32"), (8, 128, "bfloat16"), (8, 256, "float32")]
)
def test_the_kernels_compile_for_tpus(topology, key_dim, value_dim, dtype):
    code = f"""
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from ldm_jax.memory import undo_write, write_read
from ldm_jax.roofline.compile import tpu_chip
chip = tpu_chip({topology!r})
shape = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=chip)
key, value = shape(300, 2, {key_dim}), shape(300, {2 * value_dim}, dtype=jnp.{dtype})
memory = shape({key_dim}, 300, {2 * value_dim})
loss = lambda *arguments: sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in write_read(*arguments))
text = jax.jit(jax.grad(loss, argnums=range(5))).lower(memory, key, key, value, key).compile().as_text()
assert text.count("tpu_custom_call") == 2, text.count("tpu_custom_call")
jax.jit(undo_write).lower(memory, key, key, shape(300, {2 * value_dim})).compile()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
