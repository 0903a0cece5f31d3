"""Plain attention against a loop over queries, and the kernels against plain attention, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.nn.softmax_attention import flash_attention, plain_attention, splash_attention
from models import assert_close

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 2, 1, 64
SEGMENTS = np.repeat([[1, 2, 3], [1, 1, 2]], [100, 56, 100], axis=1).astype(np.int32)
each_segments = pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "documents"])


def example():
    rng = np.random.default_rng(0)
    shapes = [(2, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def loop_attention(query, key, value, segments):
    """One query at a time, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(query)
    for b, t, h in np.ndindex(query.shape[:3]):
        j = h * key.shape[2] // query.shape[2]
        visible = np.arange(t + 1)
        if segments is not None:
            visible = visible[segments[b, visible] == segments[b, t]]
        scores = key[b, visible, j] @ query[b, t, h] / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ value[b, visible, j] / weights.sum()
    return out


def as_array(segments):
    return None if segments is None else jnp.asarray(segments)


@each_segments
def test_plain_attention_equals_a_loop_over_queries(segments):
    arrays = example()
    assert_close(jax.jit(plain_attention)(*arrays, as_array(segments)), loop_attention(*arrays, segments), 2e-6)


@each_segments
def test_splash_attention_equals_plain_attention(segments):
    cotangent = jax.random.normal(jax.random.key(0), (2, TOKENS, HEADS, HEAD_DIM))

    def value_and_cotangents(attend):
        value, pull_back = jax.vjp(lambda *arrays: attend(*arrays, as_array(segments)), *example())
        return value, *pull_back(cotangent)

    kernel = functools.partial(splash_attention, interpret=True)
    found, expected = (jax.jit(functools.partial(value_and_cotangents, f))() for f in (kernel, plain_attention))
    for a, b in zip(found, expected, strict=True):
        # Softmax and sums over up to 256 tokens in another order.
        assert_close(a, b)


def test_flash_attention_falls_back_to_plain_attention():
    arrays, segments = example(), jnp.asarray(SEGMENTS)
    np.testing.assert_array_equal(flash_attention(*arrays, segments), plain_attention(*arrays, segments))
    odd = [x[:, :100] for x in arrays]  # a length that no kernel supports
    np.testing.assert_array_equal(flash_attention(*odd, None), plain_attention(*odd, None))
