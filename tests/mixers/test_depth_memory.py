"""The modules of a depth memory: equality with the one-token functions, types, options, use in other models."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax import (
    Observation,
    additive_write,
    delta_write,
    depth_memory_loop,
    init_state,
    rls_read,
    rls_write,
    sqrt_init_state,
    sqrt_rls_write,
)
from ldm_jax.mixers import DepthMemory, DepthMemoryConfig, Form, LDMConfig, Stack, Write, init_memory
from ldm_jax.mixers.ldm import LDMEnds
from random_params import random_module

WIDTH, SUBLAYERS, TOKENS = 12, 5, (2, 3)
CONFIG = DepthMemoryConfig(groups=3, key_dim=2, latent_dim=5)


def make_layers(config, count=SUBLAYERS):
    return [random_module(lambda: DepthMemory(WIDTH, SUBLAYERS, config, rngs=nnx.Rngs(0)), i) for i in range(count)]


def random_outputs(rng, count=SUBLAYERS):
    return [jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)), jnp.float32) for _ in range(count)]


def run(layers, outputs, depth=None):
    """Every layer's read, and the final state."""
    config = layers[0].config
    graphs, params = zip(*(nnx.split(layer) for layer in layers), strict=True)

    @jax.jit
    def run_layers(params, outputs):
        state, reads = init_memory(TOKENS, WIDTH, config, depth=depth), []
        for graph, own, output in zip(graphs, params, outputs, strict=True):
            layer = nnx.merge(graph, own)
            reads.append(layer.read(state, output))
            state = layer.write(state, output)
        return reads, state

    return run_layers(params, outputs)


def key_and_gate(layer, config, x, *, of_writer):
    """Keys or queries `[.., G, K]` and the gate's input `[.., G]`, from the modules' parameters, in NumPy."""
    module = layer.writer if of_writer else layer.reader
    x = np.asarray(x, np.float64)
    if not of_writer:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    latent = x @ np.asarray(module.latent.kernel[...]) + np.asarray(module.latent.bias[...])
    flat = latent @ np.asarray((module.key if of_writer else module.query).kernel[...])
    groups = 1 if config.shared_key and of_writer else config.groups
    keys = flat.reshape(*flat.shape[:-1], groups, config.key_dim)
    if config.unit_keys:
        keys = keys / np.sqrt(np.sum(keys**2, axis=-1, keepdims=True) + 1e-6)
    gate = module.importance if of_writer else module.gate
    return np.broadcast_to(keys, (*keys.shape[:-2], config.groups, config.key_dim)), (
        latent @ np.asarray(gate.kernel[...]) + np.asarray(gate.bias[...])
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


PUBLIC_WRITES = {
    Write.RLS: (rls_write, init_state),
    Write.SQRT_RLS: (sqrt_rls_write, sqrt_init_state),
    Write.ADDITIVE: (additive_write, init_state),
    Write.DELTA: (delta_write, init_state),
}
OPTIONS = [
    CONFIG,
    dataclasses.replace(CONFIG, unit_keys=False),
    dataclasses.replace(CONFIG, shared_key=True),
    dataclasses.replace(CONFIG, write=Write.SQRT_RLS, alpha=3.0),
    dataclasses.replace(CONFIG, write=Write.ADDITIVE),
    dataclasses.replace(CONFIG, write=Write.DELTA, forgetting_floor=0.5),
]


@pytest.mark.parametrize("config", OPTIONS, ids=lambda c: f"{c.write}-unit{c.unit_keys}-shared{c.shared_key}")
def test_equals_a_loop_over_tokens_and_groups(config, rng):
    # The reference computes keys, gates and forgetting in NumPy, and calls the one-token functions in Python loops.
    layers, outputs = make_layers(config), random_outputs(rng)
    reads, _ = run(layers, outputs)
    floor = 1e-3 ** (1 / SUBLAYERS) if config.forgetting_floor is None else config.forgetting_floor
    width = WIDTH // config.groups
    write, init = PUBLIC_WRITES[config.write]
    loop = jax.jit(partial(depth_memory_loop, write=write, init=init), static_argnums=(1, 2))
    written = []
    for layer, output in zip(layers[:-1], outputs[:-1], strict=True):
        key, pre = key_and_gate(layer, config, output, of_writer=True)
        importance = sigmoid(pre) if config.write is Write.DELTA else np.log1p(np.exp(pre))
        forgetting = floor + (1 - floor) * sigmoid(np.asarray(layer.forgetting.theta[...], np.float64))
        written.append((key, np.asarray(output).reshape(*TOKENS, config.groups, width), forgetting, importance))
    query, gate = key_and_gate(layers[-1], config, outputs[-1], of_writer=False)
    expected = np.zeros((*TOKENS, config.groups, width))
    for *token, group in np.ndindex(*TOKENS, config.groups):
        place = (*token, group)
        parts = [(key[place], value[place], forgetting[group], beta[place]) for key, value, forgetting, beta in written]
        observations = Observation(*(np.asarray(part, np.float32) for part in zip(*parts, strict=True)))
        M, _ = loop(observations, width, config.key_dim, config.alpha)
        scale = float(layers[-1].reader.gain[...][group]) * sigmoid(gate[place])
        expected[place] = scale * np.asarray(rls_read(M, query[place].astype(np.float32)))
    expected = expected.reshape(*TOKENS, WIDTH)
    # Both sides are float32, with four writes: a rounding error of about 1e-6 of the largest read.
    np.testing.assert_allclose(reads[-1], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


EVERY_FORM = [
    dataclasses.replace(CONFIG, write=write, form=form)
    for write in Write
    for form in (Form.RECURRENT, Form.DUAL)
    if (write, form) != (Write.DELTA, Form.DUAL)
]
each_form = pytest.mark.parametrize("config", EVERY_FORM, ids=lambda config: f"{config.write}-{config.form}")


@each_form
def test_state_is_float32_under_bfloat16(config):
    layer = random_module(lambda: DepthMemory(WIDTH, SUBLAYERS, config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    context = jnp.ones((*TOKENS, WIDTH), jnp.bfloat16)
    state = init_memory(TOKENS, WIDTH, config)
    read, after = jax.eval_shape(lambda s, c: (layer.read(s, c), layer.write(s, c)), state, context)
    assert read.dtype == jnp.bfloat16
    if config.form is Form.DUAL:
        entry = after.observations.entries[0]
        assert entry.value.dtype == jnp.bfloat16  # values are cached in the compute type
        after = after.covariance, entry._replace(value=None)
    assert {part.dtype for part in jax.tree.leaves(after)} == {jnp.dtype(jnp.float32)}
    assert layer.forgetting().dtype == jnp.float32


@each_form
def test_undo_restores_the_state(config, rng):
    layers, outputs = make_layers(config, 3), random_outputs(rng, 3)
    state = init_memory(TOKENS, WIDTH, config)
    if config.irreversible:
        state, residual = layers[0].record(state, outputs[0])
        with pytest.raises(ValueError, match="additive and delta cannot be undone"):
            layers[0].undo(state, residual)
        return

    @jax.jit
    def states_and_restored(state):
        pairs = []
        for layer, output in zip(layers, outputs, strict=True):
            after, residual = layer.record(state, output)
            pairs.append((state, layer.undo(after, residual), after))
            state = after
        return pairs

    for before, restored, after in states_and_restored(state):
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(before), strict=True)
        scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(after))
        for a, b in pairs:
            # A few roundings of 6e-8 of what is subtracted, which is as large as the state after the write.
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(scale, float(jnp.abs(b).max())))


@pytest.mark.parametrize("write", [Write.RLS, Write.SQRT_RLS, Write.ADDITIVE])
def test_the_dual_form_has_the_same_reads(write, rng):
    config = dataclasses.replace(CONFIG, write=write, forgetting_floor=0.5)
    outputs = random_outputs(rng)
    expected, _ = run(make_layers(config), outputs)
    dual = make_layers(dataclasses.replace(config, form=Form.DUAL))
    scale = max(np.abs(read).max() for read in expected)
    for depth in (None, SUBLAYERS):  # a growing and a stacked cache
        reads, _ = run(dual, outputs, depth)
        for read, expected_read in zip(reads, expected, strict=True):
            # Sums of other terms in another order: some roundings of the largest read, amplified by the regression's
            # condition number, which is up to 1e2 here.
            np.testing.assert_allclose(read, expected_read, rtol=0, atol=1e-5 * scale)


def test_initial_values():
    layer = DepthMemory(WIDTH, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    context = jax.random.normal(jax.random.key(0), (*TOKENS, WIDTH))
    latent = layer.writer.latent(context)
    np.testing.assert_allclose(jax.nn.softplus(layer.writer.importance(latent)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(jax.nn.sigmoid(layer.reader.gate(layer.reader.latent(context))), 0.5, rtol=1e-6)
    np.testing.assert_array_equal(layer.reader.gain[...], 2.0)
    floor = 1e-3 ** (1 / SUBLAYERS)
    np.testing.assert_allclose(layer.forgetting(), floor + (1 - floor) / (1 + np.exp(-4)), rtol=1e-6)


def test_forgetting_is_at_least_its_floor():
    (layer,) = make_layers(dataclasses.replace(CONFIG, forgetting_floor=0.7), 1)
    layer.forgetting.theta[...] = jnp.array([-1e4, 0.0, 1e4])
    np.testing.assert_allclose(layer.forgetting(), [0.7, 0.85, 1.0], rtol=1e-6)


@pytest.mark.parametrize("tokens", [(), (4,), (2, 3, 2)], ids=str)
def test_any_leading_shape(tokens):
    (layer,) = make_layers(CONFIG, 1)

    def read_after_write(context):
        return layer.read(layer.write(init_memory(tokens, WIDTH, CONFIG), context), context)

    context = jax.ShapeDtypeStruct((*tokens, WIDTH), jnp.float32)
    assert jax.eval_shape(read_after_write, context).shape == context.shape


def test_an_output_of_zeros_has_finite_gradients():
    (layer,) = make_layers(CONFIG, 1)
    layer.writer.latent.bias[...] = jnp.zeros_like(layer.writer.latent.bias[...])  # so that the key is 0, too

    @jax.jit
    @jax.grad
    def gradient(output):
        state = layer.write(init_memory(TOKENS, WIDTH, CONFIG), output)
        return jnp.sum(layer.read(state, output + 1))

    assert jnp.all(jnp.isfinite(gradient(jnp.zeros((*TOKENS, WIDTH)))))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"groups": 0}, "groups is 0"),
        ({"key_dim": -1}, "key_dim is -1"),
        ({"latent_dim": 0}, "latent_dim is 0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": 2e4}, r"alpha is 20000.*rls.*10000"),
        ({"alpha": 2e8, "write": Write.SQRT_RLS}, r"alpha is 2.*sqrt_rls.*1e.08"),
        ({"initial_gain": -1.0}, r"initial_gain is -1.0"),
        ({"forgetting_floor": 0.0}, "forgetting_floor is 0.0"),
        ({"forgetting_floor": 1.5}, "forgetting_floor is 1.5"),
        ({"write": Write.DELTA, "unit_keys": False}, "unit_keys is false.*delta"),
        ({"write": Write.DELTA, "form": Form.DUAL}, "form is dual.*delta.*recurrent"),
    ],
)
def test_options_out_of_range(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        DepthMemoryConfig(**options)


def test_groups_must_divide_the_width():
    with pytest.raises(ValueError, match=r"groups is 3.*width 16"):
        DepthMemory(16, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="groups is 3"):
        init_memory(TOKENS, 16, CONFIG)


def test_a_state_of_another_config():
    (layer,) = make_layers(CONFIG, 1)
    for state in (init_memory(TOKENS, WIDTH), init_memory((*TOKENS, WIDTH), WIDTH, CONFIG)):
        for step in (layer.read, layer.write):
            with pytest.raises(ValueError, match=r"shape.*init_memory"):
                step(state, jnp.ones((*TOKENS, WIDTH)))


def test_integers_are_not_read_or_written(unchecked_annotations):
    (layer,) = make_layers(CONFIG, 1)
    for step in (layer.read, layer.write):
        with pytest.raises(TypeError, match="int32"):
            step(init_memory(TOKENS, WIDTH, CONFIG), jnp.ones((*TOKENS, WIDTH), jnp.int32))


@pytest.mark.parametrize("form", [Form.RECURRENT, Form.DUAL])
def test_no_tokens(form):
    config = dataclasses.replace(CONFIG, form=form)
    (layer,) = make_layers(config, 1)
    x = jnp.ones((0, 8, WIDTH))
    assert layer.read(layer.write(init_memory((0, 8), WIDTH, config), x), x).shape == x.shape


def test_a_learned_alpha_stays_in_its_range():
    config = LDMConfig(groups=2, key_dim=2, latent_dim=4, learned_alpha=True)
    ends = LDMEnds(config, Stack(8, 2, jnp.float32, False), nnx.Rngs(0))
    np.testing.assert_allclose(ends.alpha, [10, 10], rtol=1e-6)
    ends.log_alpha[...] = jnp.array([-100.0, 100.0])
    np.testing.assert_allclose(ends.alpha, config.alpha_range, rtol=1e-5)


def test_initial_memory_equals_init_state():
    state = init_memory(TOKENS, WIDTH, CONFIG)
    M, P = init_state(WIDTH // CONFIG.groups, CONFIG.key_dim, CONFIG.alpha)
    assert state.memory.shape == (*TOKENS, CONFIG.groups, *M.T.shape)
    np.testing.assert_array_equal(state.covariance.matrix[1, 2, 0], P)
