"""The fused form: the numbers and parameters of the recurrent one, with every write put off until the next read."""

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

MODEL = ModelConfig(vocabulary=16, depth=2, width=128, heads=2, mlp_width=64)
TOKENS = jax.random.randint(jax.random.key(1), (2, 5), 0, MODEL.vocabulary)


def mixer(form, backward=Backward.STORED, **options):
    return MixerConfig(backward=backward, ldm=LDMConfig(groups=1, key_dim=2, latent_dim=8, form=form, **options))


def loss_and_grads(config, kind):
    graph, params = model_graph(config, kind), init_params(config, kind, 0)
    return jax.jit(jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(TOKENS, TOKENS)))(params)


def use_the_kernels(monkeypatch):
    for name in ("write_read", "undo_write"):
        monkeypatch.setattr(fused, name, functools.partial(getattr(fused, name), interpret=True))


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("backward", "options", "change", "interpret"),
    [
        slow("reversible", {}, {}, True),
        slow("reversible", {}, {}, False),
        slow("remat", {"write_embedding": False}, {}, False),
        slow("reversible", {"write": Write.SQRT_RLS}, {"scan": False}, False),
    ],
)
def test_equals_the_recurrent_form(monkeypatch, backward, options, change, interpret):
    if interpret:
        use_the_kernels(monkeypatch)
    config = dataclasses.replace(MODEL, **change)
    expected = loss_and_grads(config, mixer(Form.RECURRENT, **options))
    actual = loss_and_grads(config, mixer(Form.FUSED, Backward(backward), **options))
    assert float(abs(actual[0] - expected[0])) < 1e-6 * float(expected[0])
    # Only the order of float32 sums differs.
    difference = jax.tree.map(jnp.subtract, actual[1], expected[1])
    assert optax.tree.norm(difference) < 1e-5 * optax.tree.norm(expected[1])


@pytest.mark.parametrize("interpret", [False, True])
def test_a_chain_of_sublayers_equals_the_recurrent_form(monkeypatch, rng, interpret):
    if interpret:
        use_the_kernels(monkeypatch)
    embedding = jnp.asarray(rng.normal(size=(1, 3, 128)), jnp.float32)

    def run(form, embedding, undo=False):
        config, stack = mixer(form), Stack(128, 4, jnp.float32, scanned=True)
        ends = make_ends(config, stack, nnx.Rngs(9))
        layers = [make_layer(config, stack, Place(0, False), nnx.Rngs(index)) for index in range(4)]
        state = first = ends.start(embedding)
        kept = []
        for layer in layers:
            x, state = layer.read(state)
            state, part = layer.write(state, jnp.tanh(x))
            kept.append(part)
        memory = state.memory
        for layer, part in zip(reversed(layers), reversed(kept) if undo else (), strict=undo):
            memory = layer.undo(memory, part)
        return ends.finish(state), first.memory, memory

    results = {form: run(form, embedding, undo=True) for form in (Form.RECURRENT, Form.FUSED)}
    np.testing.assert_allclose(results[Form.FUSED][0], results[Form.RECURRENT][0], atol=1e-5)
    for before, undone in zip(*map(jax.tree.leaves, results[Form.FUSED][1:]), strict=True):
        np.testing.assert_allclose(undone, before, atol=1e-4)
    grads = [jax.grad(lambda x, form=form: jnp.sum(jnp.sin(run(form, x)[0])))(embedding) for form in results]
    np.testing.assert_allclose(grads[1], grads[0], atol=1e-4 * float(jnp.abs(grads[0]).max()))


def test_state_is_float32_whatever_the_compute_type():
    config = dataclasses.replace(MODEL, compute_dtype=ComputeType.BFLOAT16)
    model = nnx.merge(model_graph(config, mixer(Form.FUSED)), init_params(config, mixer(Form.FUSED), 0))
    state = jax.eval_shape(lambda tokens: model._apply_blocks(model.mixer.start(model.embed(tokens))), TOKENS)
    memory, covariance, write = state.memory.memory, state.memory.covariance, state.memory.last_write
    assert write.value.dtype == state.stream.dtype == jnp.bfloat16
    float32 = jax.tree.leaves((memory, covariance, write.key, write.gain))
    assert all(leaf.dtype == jnp.float32 for leaf in float32)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"groups": 4}, "multiple of 128.*groups is 4, which makes groups 64 of 256 wide"),
        ({"groups": 1, "key_dim": 33}, "at most 8192 / key_dim, but key_dim is 33"),
        ({"groups": 2, "write": Write.DELTA}, "the write delta does not have: set form to recurrent"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LDMConfig(form=Form.FUSED, **options).check_width(256)


def test_a_memory_by_itself_has_the_recurrent_numbers(rng):
    # Whether the state that a read returns is used, dropped, or the memory is written twice without a read.
    x = jnp.asarray(rng.normal(size=(5, 2, 3, 128)), jnp.float32)

    def run(form):
        config = DepthMemoryConfig(groups=1, key_dim=2, form=form)
        layer = DepthMemory(128, 4, config, rngs=nnx.Rngs(0))
        state = layer.write(init_memory((2, 3), 128, config), x[0])
        reads = [layer.read(state, x[1])]
        state = layer.write(layer.write(state, x[1]), x[2])
        readout, state = layer.recall(state, x[3])
        return [*reads, readout, layer.read(layer.write(state, x[3]), x[4])]

    for fused_read, expected in zip(run(Form.FUSED), run(Form.RECURRENT), strict=True):
        np.testing.assert_allclose(fused_read, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_a_done_write_is_not_read_again():
    config = DepthMemoryConfig(groups=1, form=Form.FUSED)
    layer = DepthMemory(128, 4, config, rngs=nnx.Rngs(0))
    _, state = layer.recall(init_memory((2, 3), 128, config), jnp.ones((2, 3, 128)))
    with pytest.raises(ValueError, match="one read between two writes"):
        layer.read(state, jnp.ones((2, 3, 128)))
