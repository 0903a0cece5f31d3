"""The depth memory's modules: the shared functions underneath, float32 state, options, use in another model."""

import dataclasses

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
from ldm_jax.mixers import DepthMemory, DepthMemoryConfig, Form, Write, init_memory

WIDTH, SUBLAYERS, TOKENS = 12, 5, (2, 3)
CONFIG = DepthMemoryConfig(groups=3, key_dim=2, latent_dim=5)


def randomised(module, seed=0):
    """The module with every parameter random, so that no gate is at its start."""
    graph, params = nnx.split(module, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [leaf + 0.5 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, moved))


def make_layers(config, count=SUBLAYERS):
    return [randomised(DepthMemory(WIDTH, SUBLAYERS, config, rngs=nnx.Rngs(seed)), seed) for seed in range(count)]


def run(layers, config, outputs):
    state = init_memory(TOKENS, WIDTH, config)
    reads = []
    for layer, output in zip(layers, outputs, strict=True):
        reads.append(layer.read(state, output))
        state = layer.write(state, output)
    return reads, state


def by_hand(layer, config, x, *, of_writer):
    """Keys or queries `[.., G, K]` and the gate's input `[.., G]`, from the modules' own parameters, in NumPy."""
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


TWINS = {
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
    # The twin computes keys, gates and forgetting in NumPy and calls the one-token functions in Python loops.
    layers = make_layers(config)
    outputs = [jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)), jnp.float32) for _ in layers]
    reads, _ = run(layers, config, outputs)
    final = outputs[-1]
    floor = 1e-3 ** (1 / SUBLAYERS) if config.forgetting_floor is None else config.forgetting_floor
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    query, gate = by_hand(layers[-1], config, final, of_writer=False)
    write, init = TWINS[config.write]
    expected = np.zeros((*TOKENS, WIDTH))
    width = WIDTH // config.groups
    for token in np.ndindex(TOKENS):
        for group in range(config.groups):
            observations = []
            for layer, output in list(zip(layers, outputs, strict=True))[:-1]:
                keys, pre = by_hand(layer, config, output, of_writer=True)
                importance = sigmoid(pre) if config.write is Write.DELTA else np.log1p(np.exp(pre))
                forgetting = floor + (1 - floor) * sigmoid(np.asarray(layer.forgetting.theta[...], np.float64))
                value = np.asarray(output[token]).reshape(config.groups, width)[group]
                part = keys[(*token, group)], value, forgetting[group], importance[(*token, group)]
                observations.append(tuple(np.asarray(p, np.float32) for p in part))
            stacked = Observation(*(np.stack(parts) for parts in zip(*observations, strict=True)))
            M, _ = depth_memory_loop(stacked, width, config.key_dim, config.alpha, write, init)
            answer = np.asarray(rls_read(M, query[(*token, group)].astype(np.float32)))
            scale = float(layers[-1].reader.gain[...][group]) * sigmoid(gate[(*token, group)])
            expected[token][group * width : (group + 1) * width] = scale * answer
    # float32 on both sides, five writes: rounding of about 1e-6 of the largest entry
    np.testing.assert_allclose(reads[-1], expected, atol=2e-5 * np.abs(expected).max())


EVERY_FORM = [
    dataclasses.replace(CONFIG, write=write, form=form)
    for write in Write
    for form in (Form.RECURRENT, Form.DUAL)
    if (write, form) != (Write.DELTA, Form.DUAL)
]
each_form = pytest.mark.parametrize("config", EVERY_FORM, ids=lambda config: f"{config.write}-{config.form}")


@each_form
def test_state_is_float32_under_bfloat16(config):
    layer = DepthMemory(WIDTH, SUBLAYERS, config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    context = jnp.ones((*TOKENS, WIDTH), jnp.bfloat16)
    state = init_memory(TOKENS, WIDTH, config)
    shapes = jax.eval_shape(lambda s, c: (layer.read(s, c), layer.write(s, c)), state, context)
    assert shapes[0].dtype == jnp.bfloat16
    after = shapes[1]
    if config.form is Form.DUAL:
        entry = after.observations.entries[0]
        assert entry.value.dtype == jnp.bfloat16  # the values, in the compute type
        after = after.covariance, entry._replace(value=None)
    assert {part.dtype for part in jax.tree.leaves(after)} == {jnp.dtype(jnp.float32)}
    assert layer.forgetting().dtype == jnp.float32


@each_form
def test_undo_gives_the_state_before(config, rng):
    layers = make_layers(config)
    state = init_memory(TOKENS, WIDTH, config)
    for layer in layers:
        before = state
        output = jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)), jnp.float32)
        state, kept = layer.record(state, output)
        if config.irreversible:
            with pytest.raises(ValueError, match="no undo"):
                layer.undo(state, kept)
            continue
        restored = layer.undo(state, kept)
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(before), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("write", [Write.RLS, Write.SQRT_RLS, Write.ADDITIVE])
@pytest.mark.parametrize("depth", [None, SUBLAYERS], ids=["growing", "stacked"])
def test_the_dual_form_reads_the_same(write, depth, rng):
    config = dataclasses.replace(CONFIG, write=write, forgetting_floor=0.5)
    layers = make_layers(config)
    other_form = dataclasses.replace(config, form=Form.DUAL)
    dual = [DepthMemory(WIDTH, SUBLAYERS, other_form, rngs=nnx.Rngs(0)) for _ in layers]
    for other, layer in zip(dual, layers, strict=True):
        nnx.update(other, nnx.state(layer))
    outputs = [jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)), jnp.float32) for _ in layers]
    reads, _ = run(layers, config, outputs)
    state = init_memory(TOKENS, WIDTH, dual[0].config, depth=depth)
    for layer, output, expected in zip(dual, outputs, reads, strict=True):
        # float32: sums of other terms in another order, relative to the largest readout
        np.testing.assert_allclose(layer.read(state, output), expected, atol=1e-4 * (1 + np.abs(expected).max()))
        state = layer.write(state, output)


def test_starts_as_documented():
    layer = DepthMemory(WIDTH, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    context = jax.random.normal(jax.random.key(0), (*TOKENS, WIDTH))
    latent = layer.writer.latent(context)
    np.testing.assert_allclose(jax.nn.softplus(layer.writer.importance(latent)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(jax.nn.sigmoid(layer.reader.gate(layer.reader.latent(context))), 0.5, rtol=1e-6)
    np.testing.assert_array_equal(layer.reader.gain[...], 2.0)
    floor = 1e-3 ** (1 / SUBLAYERS)
    np.testing.assert_allclose(layer.forgetting(), floor + (1 - floor) / (1 + np.exp(-4)), rtol=1e-6)


def test_forgetting_never_falls_below_its_floor():
    layer = DepthMemory(WIDTH, SUBLAYERS, dataclasses.replace(CONFIG, forgetting_floor=0.7), rngs=nnx.Rngs(0))
    layer.forgetting.theta[...] = jnp.array([-1e4, 0.0, 1e4])
    np.testing.assert_allclose(layer.forgetting(), [0.7, 0.85, 1.0], rtol=1e-6)


def test_any_leading_shape_and_no_batch_at_all():
    layer = DepthMemory(WIDTH, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    for tokens in ((), (4,), (2, 3, 2)):
        context = jax.random.normal(jax.random.key(1), (*tokens, WIDTH))
        state = layer.write(init_memory(tokens, WIDTH, CONFIG), context)
        assert layer.read(state, context).shape == context.shape


def test_zero_output_has_finite_gradients():
    layer = DepthMemory(WIDTH, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    layer.writer.latent.bias[...] *= 0  # with it the key is zero, too

    def loss(output):
        state = layer.write(init_memory(TOKENS, WIDTH, CONFIG), output)
        return jnp.sum(layer.read(state, output + 1))

    assert jnp.all(jnp.isfinite(jax.grad(loss)(jnp.zeros((*TOKENS, WIDTH)))))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 0}, "groups is 0"),
        ({"key_dim": -1}, "key_dim is -1"),
        ({"latent_dim": 0}, "latent_dim is 0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"forgetting_floor": 0.0}, "forgetting_floor is 0.0"),
        ({"forgetting_floor": 1.5}, "forgetting_floor is 1.5"),
        ({"write": Write.DELTA, "unit_keys": False}, "unit_keys"),
        ({"write": Write.DELTA, "form": Form.DUAL}, "set form to recurrent"),
    ],
)
def test_inadmissible_options(options, words):
    with pytest.raises(ValueError, match=words):
        DepthMemoryConfig(**options)


def test_groups_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="groups is 3, which does not divide the width 16"):
        DepthMemory(16, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="groups is 3"):
        init_memory(TOKENS, 16, CONFIG)


def test_a_state_of_another_config_is_named():
    layer = DepthMemory(WIDTH, SUBLAYERS, CONFIG, rngs=nnx.Rngs(0))
    for state in (init_memory(TOKENS, WIDTH), init_memory((*TOKENS, WIDTH), WIDTH, CONFIG)):
        for step in (layer.read, layer.write):
            with pytest.raises(ValueError, match=r"shape.*init_memory"):
                step(state, jnp.ones((*TOKENS, WIDTH)))


def test_initial_memory_is_the_pure_one():
    state = init_memory(TOKENS, WIDTH, CONFIG)
    M, P = init_state(WIDTH // CONFIG.groups, CONFIG.key_dim, CONFIG.alpha)
    assert state.memory.shape == (*TOKENS, CONFIG.groups, *M.T.shape)
    np.testing.assert_array_equal(state.covariance.matrix[1, 2, 0], P)
