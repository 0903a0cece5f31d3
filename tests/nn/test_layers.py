"""The layers against plain NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ldm_jax.nn.attention import Attention
from ldm_jax.nn.loss import chunked_cross_entropy
from ldm_jax.nn.mlp import MLP
from ldm_jax.nn.rope import rotate
from models import MODEL, assert_close


def test_rotation_by_position(rng):
    x = rng.normal(size=(2, 7, 3, 8)).astype(np.float32)
    expected = np.empty_like(x)
    for t in range(7):
        for c in range(4):
            angle = t * 100.0 ** (-2 * c / 8)
            expected[:, t, :, c] = np.cos(angle) * x[:, t, :, c] - np.sin(angle) * x[:, t, :, c + 4]
            expected[:, t, :, c + 4] = np.sin(angle) * x[:, t, :, c] + np.cos(angle) * x[:, t, :, c + 4]
    assert_close(rotate(jnp.asarray(x), 100.0), expected, 2e-6)  # float32 angles of up to 7 radians


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention(qk_norm, rng):
    config = dataclasses.replace(MODEL, qk_norm=qk_norm)
    layer = Attention(config, rngs=nnx.Rngs(1))
    x = rng.normal(size=(2, 5, 16)).astype(np.float32)
    H, J, C = 4, 2, 4

    def heads(name, count):
        return (x @ np.asarray(getattr(layer, name).kernel[...])).reshape(2, 5, count, C)

    def positioned(y):
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) if qk_norm else y
        return np.asarray(rotate(jnp.asarray(y), config.rope_base))

    q, k, v = positioned(heads("query", H)), positioned(heads("key", J)), heads("value", J)
    mixed = np.zeros((2, 5, H, C), np.float32)
    for b in range(2):
        for h in range(H):
            j = h // (H // J)
            for t in range(5):
                weights = softmax(q[b, t, h] @ k[b, : t + 1, j].T / np.sqrt(C))
                mixed[b, t, h] = weights @ v[b, : t + 1, j]
    expected = mixed.reshape(2, 5, 16) @ np.asarray(layer.out.kernel[...])
    assert_close(jax.jit(lambda x: layer(x))(jnp.asarray(x)), expected)


def test_mlp(rng):
    layer = MLP(MODEL, rngs=nnx.Rngs(1))
    x = rng.normal(size=(2, 5, 16)).astype(np.float32)
    gate, up, out = (np.asarray(getattr(layer, name).kernel[...]) for name in ("gate", "up", "out"))
    a = x @ gate
    assert_close(jax.jit(lambda x: layer(x))(jnp.asarray(x)), (a / (1 + np.exp(-a)) * (x @ up)) @ out)


@pytest.mark.parametrize("chunk", [1, 7, 18, 100])
def test_chunked_loss_equals_the_whole(chunk, rng):
    hidden = jnp.asarray(rng.normal(size=(2, 9, 6)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(6, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(11, size=(2, 9)), jnp.int32)

    def whole(hidden, head):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, targets).mean()

    def chunked(hidden, head):
        return jnp.mean(chunked_cross_entropy(hidden, targets, lambda h: h @ head, chunk).cross_entropy)

    expected, actual = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head) for loss in (whole, chunked))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 2e-6)  # sums of 18 float32 numbers in another order


def test_logits_of_all_tokens_are_not_materialised():
    # The logits of 4096 tokens and 1000 symbols take 16 MB in float32; those of a chunk of 64 tokens take 256 kB.
    hidden, head = jnp.zeros((1, 4096, 8)), jnp.zeros((8, 1000))
    targets = jnp.zeros((1, 4096), jnp.int32)

    def temporary_bytes(chunk):
        loss = lambda h, w: jnp.mean(chunked_cross_entropy(h, targets, lambda x: x @ w, chunk).cross_entropy)  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(64) < 2e6
    assert temporary_bytes(4096) > 16e6
