"""The form fused has the reads, parameters and gradients of the form recurrent."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ldm_jax.config import ComputeType, ModelConfig
from ldm_jax.memory import Backward, fused
from ldm_jax.mixers import (
    DepthMemory,
    DepthMemoryConfig,
    Form,
    LDMConfig,
    MixerConfig,
    Place,
    Stack,
    Write,
    init_memory,
    make_ends,
    make_layer,
)
from ldm_jax.nn import init_params, model_graph
from random_params import random_module

MODEL = ModelConfig(vocabulary=16, depth=2, width=128, heads=2, mlp_width=64)
TOKENS = jax.random.randint(jax.random.key(1), (2, 5), 0, MODEL.vocabulary)


def mixer(form, backward=Backward.STORED, **options):
    return MixerConfig(backward=backward, ldm=LDMConfig(groups=1, key_dim=2, latent_dim=8, form=form, **options))


def loss_and_grads(config, mixer_config):
    graph, params = model_graph(config, mixer_config), init_params(config, mixer_config, 0)
    return jax.jit(jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(TOKENS, TOKENS)))(params)


def interpret_kernels(monkeypatch):
    """Replaces plain JAX by the kernels in Pallas's interpreter."""
    for name in ("write_read", "undo_write"):
        monkeypatch.setattr(fused, name, functools.partial(getattr(fused, name), interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backward", "options", "change", "interpret"),
    [
        ("reversible", {}, {}, True),
        ("reversible", {}, {}, False),
        ("remat", {"write_embedding": False}, {}, False),
        ("reversible", {"write": Write.SQRT_RLS}, {"scan": False}, False),
    ],
)
def test_equals_the_recurrent_form_in_a_model(monkeypatch, backward, options, change, interpret):
    if interpret:
        interpret_kernels(monkeypatch)
    config = dataclasses.replace(MODEL, **change)
    expected = loss_and_grads(config, mixer(Form.RECURRENT, **options))
    actual = loss_and_grads(config, mixer(Form.FUSED, Backward(backward), **options))
    assert float(abs(actual[0] - expected[0])) < 1e-6 * float(expected[0])
    # Only the order of float32 sums differs.
    difference = jax.tree.map(jnp.subtract, actual[1], expected[1])
    assert optax.tree.norm(difference) < 1e-5 * optax.tree.norm(expected[1])


@functools.cache
def chain(form, interpret=False):
    """Three sublayers: the result, the memory at the start and after undoing all writes, and the gradient."""
    config, stack = mixer(form), Stack(128, 3, jnp.float32, scanned=True)
    ends = random_module(lambda: make_ends(config, stack, nnx.Rngs(0)))
    layers = [random_module(lambda: make_layer(config, stack, Place(0, False), nnx.Rngs(0)), i) for i in range(3)]

    def run(embedding):
        state = first = ends.start(embedding)
        residuals = []
        for layer in layers:
            x, state = layer.read(state)
            state, residual = layer.write(state, jnp.tanh(x))
            residuals.append(residual)
        memory, residuals = jax.lax.stop_gradient((state.memory, residuals))
        for layer, residual in zip(reversed(layers), reversed(residuals), strict=True):
            memory = layer.undo(memory, residual)
        result = ends.finish(state)
        return jnp.sum(jnp.sin(result)), (result, first.memory, memory)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def largest(x):
    return float(jnp.abs(x).max())


@pytest.mark.parametrize("interpret", [False, True])
def test_a_chain_of_sublayers_equals_the_recurrent_form(monkeypatch, rng, interpret):
    if interpret:
        interpret_kernels(monkeypatch)
    embedding = jnp.asarray(rng.normal(size=(1, 3, 128)), jnp.float32)
    (_, (expected, _, _)), expected_gradient = chain(Form.RECURRENT)(embedding)
    (_, (result, first, restored)), gradient = chain(Form.FUSED, interpret)(embedding)
    # Four writes and reads in float32: some tens of roundings of 6e-8 of the largest entries.
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * largest(expected))
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-4 * largest(expected_gradient))
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(first), strict=True):
        # The memory starts at 0, and its entries grow to the size of the outputs, 1.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, largest(b)))


def test_state_is_float32_for_every_compute_type():
    config, fused_mixer = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16), mixer(Form.FUSED)
    graph, params = model_graph(config, fused_mixer), jax.eval_shape(lambda: init_params(config, fused_mixer, 0))

    def first_state(params):
        model = nnx.merge(graph, params)
        return model.mixer.start(model.embedding(TOKENS))

    state = jax.eval_shape(first_state, params)
    memory, covariance, write = state.memory.memory, state.memory.covariance, state.memory.last_write
    assert write.value.dtype == state.stream.dtype == jnp.bfloat16
    float32 = jax.tree.leaves((memory, covariance, write.key, write.gain))
    assert all(leaf.dtype == jnp.float32 for leaf in float32)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"groups": 4}, r"form is fused.*128.*groups is 4"),
        ({"groups": 1, "key_dim": 33}, r"form is fused.*8192.*key_dim is 33"),
        ({"groups": 2, "write": Write.DELTA}, r"form is fused.*write is delta"),
    ],
)
def test_unsupported_options(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        LDMConfig(form=Form.FUSED, **options).check_width(256)


def test_a_depth_memory_by_itself_equals_the_recurrent_form(rng):
    # Reads whose state is used or dropped, and two writes without a read between them.
    x = jnp.asarray(rng.normal(size=(5, 2, 3, 128)), jnp.float32)

    def run(form):
        config = DepthMemoryConfig(groups=1, key_dim=2, form=form)
        layer = random_module(lambda: DepthMemory(128, 4, config, rngs=nnx.Rngs(0)))

        @jax.jit
        def reads(x):
            state = layer.write(init_memory((2, 3), 128, config), x[0])
            first = layer.read(state, x[1])
            state = layer.write(layer.write(state, x[1]), x[2])
            readout, state = layer.recall(state, x[3])
            return first, readout, layer.read(layer.write(state, x[3]), x[4])

        return reads(x)

    for actual, expected in zip(run(Form.FUSED), run(Form.RECURRENT), strict=True):
        # Five writes in float32, as above.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * largest(expected))


def test_two_reads_between_writes():
    config = DepthMemoryConfig(groups=1, form=Form.FUSED)
    layer = random_module(lambda: DepthMemory(128, 4, config, rngs=nnx.Rngs(0)))

    def read_twice(x):
        _, state = layer.recall(init_memory((2, 3), 128, config), x)
        return layer.read(state, x)

    with pytest.raises(ValueError, match=r"fused.*one read between two writes"):
        jax.eval_shape(read_twice, jnp.ones((2, 3, 128)))
