"""The kernels of attention against plain attention, values and gradients; and plain attention against a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.nn.softmax_attention import flash_attention, plain_attention, splash_attention

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
SEGMENTS = jnp.asarray(np.repeat([[1, 2, 3], [1, 1, 2]], [100, 56, 100], axis=1).astype(np.int32))


def example(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def loop_attention(query, key, value, segments):
    """One query at a time, float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(query)
    for b, t, h in np.ndindex(query.shape[:3]):
        j = h * key.shape[2] // query.shape[2]
        seen = np.arange(t + 1)
        if segments is not None:
            seen = seen[np.asarray(segments)[b, seen] == segments[b, t]]
        scores = key[b, seen, j] @ query[b, t, h] / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ value[b, seen, j] / weights.sum()
    return out


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "documents"])
def test_plain_attention_is_a_loop_over_queries(segments):
    query, key, value = example()
    np.testing.assert_allclose(
        plain_attention(query, key, value, segments), loop_attention(query, key, value, segments), atol=1e-5
    )


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "documents"])
def test_splash_attention_is_plain_attention(segments):
    kernel = functools.partial(splash_attention, interpret=True)
    cotangent = jax.random.normal(jax.random.key(0), (2, TOKENS, HEADS, HEAD_DIM))

    def value_and_pull(attend):
        value, pull = jax.vjp(lambda *arrays: attend(*arrays, segments), *example())
        return value, *pull(cotangent)

    found, expected = (jax.jit(functools.partial(value_and_pull, attend))() for attend in (kernel, plain_attention))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)  # softmax and sums in another order


def test_flash_attention_is_plain_where_there_is_no_kernel():
    arrays = example()
    np.testing.assert_array_equal(flash_attention(*arrays, SEGMENTS), plain_attention(*arrays, SEGMENTS))
    odd = [x[:, :100] for x in arrays]  # which no kernel takes
    np.testing.assert_array_equal(flash_attention(*odd, None), plain_attention(*odd, None))
