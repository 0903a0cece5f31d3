"""`depth_scan`: all backward modes have the same gradient, at extreme gates and under JAX's transformations."""

import functools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from depth_problems import RLS, each_regression, random_observations
from ldm_jax import Backward, Observation, depth_memory_loop, depth_scan, dual_read, rls_read
from ldm_jax.memory.depth_cache import GrowingCache, StackedCache

DEPTH, VALUE, KEY, ALPHA = 96, 3, 4, 2.0
MODES = [
    ("stored", False), ("remat", True), ("remat", False), ("reversible", True), ("reversible", False)
]  # fmt: skip
each_mode = pytest.mark.parametrize(("backward", "scan"), MODES)


class Layer(NamedTuple):
    """A layer reads the memory, and writes a value that depends on the read."""

    query: jax.Array
    observation: Observation


class State(NamedTuple):
    stream: jax.Array
    memory: tuple[jax.Array, jax.Array]


def step_and_undo(regression, scale):
    """The step closes over `scale`."""

    def step(layer, state):
        x = 0.3 * state.stream + rls_read(state.memory[0], layer.query)
        output = layer.observation.value + 0.2 * scale * jnp.tanh(x)
        observation = layer.observation._replace(value=output)
        correction = regression.correction(*state.memory, observation)
        after = State(0.7 * state.stream + output, regression.apply(*state.memory, correction, observation))
        return after, (state.stream, correction)

    def undo(layer, state, residual):
        stream, correction = residual
        observation = layer.observation._replace(value=correction.error)  # undoing does not use the value
        return State(stream, regression.undo(*state.memory, correction, observation))

    return step, undo


def network(regression, backward, scan, scale=1.0):
    """`(layers, initial state) -> final state`."""
    step, undo = step_and_undo(regression, scale)
    return lambda layers, state: depth_scan(step, state, layers, backward=Backward(backward), undo=undo, scan=scan)


def random_layers(rng, dtype, depth=DEPTH, **options):
    observations = random_observations(rng, depth, VALUE, KEY, **options)
    query = rng.normal(size=(depth, KEY)).astype(np.float32)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), Layer(query, observations))


def start(regression, dtype):
    return State(jnp.linspace(-1, 1, VALUE, dtype=dtype), regression.init(VALUE, KEY, ALPHA, dtype))


@partial(jax.jit, static_argnums=(0, 1, 2))
def loss_and_gradient(regression, backward, scan, layers, state, scale):
    def loss(layers, state, scale):
        stream, (memory, _) = network(regression, backward, scan, scale)(layers, state)
        return jnp.sum(jnp.sin(stream)) + jnp.sum(jnp.cos(memory))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(layers, state, scale)


def worst(actual, expected):
    """The largest relative error of a leaf: the norm of the difference over the norm of the expected leaf.

    Leaves with less than a thousandth of the largest norm (such as the initial state, which is forgotten) are compared
    relative to that thousandth.
    """
    actual, expected = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (actual, expected))
    least = 1e-3 * max(np.linalg.norm(x) for x in expected)
    pairs = zip(actual, expected, strict=True)
    return max(np.linalg.norm(a - b) / max(np.linalg.norm(b), least) for a, b in pairs)


def whole(actual, expected):
    """The norm of the difference over the norm of what is expected, of all leaves together."""
    return worst(*(ravel_pytree(tree)[0] for tree in (actual, expected)))


FLOOR = 1e-3 ** (1 / DEPTH)
GATES = {
    "ordinary": {},
    "floor": {"forgetting": FLOOR},
    "no forgetting": {"forgetting": 1.0},
    "importance 0 and 1000": {"forgetting": FLOOR, "importance": "extreme"},
    "shared direction": {"forgetting": FLOOR, "shared": 0.9},
    "identical keys": {"forgetting": FLOOR, "shared": 1.0},
}


def gated_layers(rng, name, dtype):
    options = dict(GATES[name])
    extreme = options.pop("importance", None)
    layers = random_layers(rng, dtype, **options)
    if extreme:
        importance = jnp.asarray(rng.choice([0.0, 1.0, 1e3], size=DEPTH), dtype)
        layers = layers._replace(observation=layers.observation._replace(importance=importance))
    return layers


@pytest.mark.parametrize("name", GATES)
@each_regression
def test_reversible_equals_stored_at_extreme_gates(rng, x64, regression, name, record_property):
    layers = gated_layers(rng, name, jnp.float64)
    expected = loss_and_gradient(regression, "stored", True, layers, start(regression, jnp.float64), 1.0)
    actual = loss_and_gradient(regression, "reversible", True, layers, start(regression, jnp.float64), 1.0)
    assert worst(actual, expected) < 1e-10

    # In float32, the whole gradient, which is what an optimizer uses. With identical keys, forgetting inflates P a
    # thousand times in the other directions, and `stored` has a larger error, too.
    single = jax.tree.map(lambda x: x.astype(jnp.float32), layers)
    stored, reversible = (
        loss_and_gradient(regression, mode, True, single, start(regression, jnp.float32), jnp.float32(1))
        for mode in ("stored", "reversible")
    )
    record_property(
        "float32", f"reversible {whole(reversible, stored):.1e}, stored against float64 {worst(stored, expected):.1e}"
    )
    if name != "identical keys":
        assert whole(reversible, stored) < 1e-5
    # Each leaf by itself: undoing repeats the roundings of the write, so a few times the float32 error of `stored`.
    assert worst(reversible, expected) < 1e-5 + 4 * worst(stored, expected)


@each_mode
def test_all_modes_have_the_same_gradient(rng, x64, backward, scan):
    layers = random_layers(rng, jnp.float64, depth=3)
    expected = loss_and_gradient(RLS, "stored", True, layers, start(RLS, jnp.float64), 0.7)
    actual = loss_and_gradient(RLS, backward, scan, layers, start(RLS, jnp.float64), 0.7)
    assert worst(actual, expected) < 1e-12


def test_undo_restores_the_states(rng):
    regression, restored = RLS, []
    layers = random_layers(rng, jnp.float32, depth=48)

    def step(layer, state):
        correction = regression.correction(*state, layer.observation)
        return regression.apply(*state, correction, layer.observation), correction

    def undo(layer, state, residual):
        before = regression.undo(*state, residual, layer.observation)
        jax.debug.callback(lambda m: restored.append(np.abs(m).max()), before[0])
        return before

    run = lambda state: jnp.sum(depth_scan(step, state, layers, backward=Backward.REVERSIBLE, undo=undo)[0])  # noqa: E731
    memory, inverse_covariance = regression.init(VALUE, KEY, ALPHA)
    jax.block_until_ready(jax.jit(jax.grad(lambda p: run((memory, p))))(inverse_covariance))
    jax.effects_barrier()
    assert len(restored) == 48
    assert min(restored) < 3e-7 * max(restored)  # the first M is 0, restored up to a few roundings of the largest M


def test_under_vmap_jit_and_checkpoint(rng, x64):
    layers = [random_layers(rng, jnp.float64, depth=3) for _ in range(3)]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    state = start(RLS, jnp.float64)

    def gradient(backward):
        def loss(layers):
            return jnp.sum(jnp.sin(jax.checkpoint(network(RLS, backward, True))(layers, state).stream))

        return jax.grad(loss)

    stored = jax.jit(gradient("stored"))
    batched = jax.jit(jax.vmap(gradient("reversible")))(batch)
    for index, one in enumerate(layers):
        assert worst(jax.tree.map(lambda x, index=index: x[index], batched), stored(one)) < 1e-12


def test_gradient_of_a_vmap_over_closed_over_arrays(rng, x64):
    layers = [random_layers(rng, jnp.float64, depth=3) for _ in range(3)]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    state = start(RLS, jnp.float64)

    def gradient(backward):
        def total(scale):
            over = jax.vmap(lambda one, scale: network(RLS, backward, True, scale)(one, state).stream)
            return jnp.sum(over(batch, scale))

        return jax.jit(jax.grad(total))(jnp.array([0.3, 1.0, 2.0]))

    assert worst(gradient("reversible"), gradient("stored")) < 1e-12


@pytest.mark.parametrize("scan", [True, False])
def test_integers_and_closed_over_arrays(x64, scan):
    # An integer per layer selects a row of a closed-over table; an integer in the state counts layers; a random key and
    # a mask are closed over.
    table, mask, key = jnp.arange(12.0).reshape(4, 3) / 7, jnp.array([1, 0, 1]), jax.random.key(3)
    layers = {"row": jnp.array([2, 0, 3, 3, 1]), "weight": jnp.linspace(0.5, 1.5, 5)}

    def run(backward, table, layers):
        noise = jax.random.normal(key, (3,))

        def step(layer, state):
            x, count = state
            x = jnp.where(mask == 1, x, 0) + layer["weight"] * jnp.sin(
                table[layer["row"]] + noise * count.astype(x.dtype)
            )
            return (x, count + 1), state[0]

        undo = lambda layer, state, residual: (residual, state[1] - 1)  # noqa: E731
        state = jnp.ones(3), jnp.zeros((), jnp.int32)
        return jnp.sum(depth_scan(step, state, layers, backward=Backward(backward), undo=undo, scan=scan)[0])

    def gradient(backward):
        of = lambda table, weight: run(backward, table, layers | {"weight": weight})  # noqa: E731
        return jax.jit(jax.grad(of, argnums=(0, 1)))(table, layers["weight"])

    assert worst(gradient("reversible"), gradient("stored")) < 1e-12


@pytest.mark.parametrize("scan", [True, False])
def test_forward_mode(rng, scan):
    layers, state = random_layers(rng, jnp.float32, depth=2), start(RLS, jnp.float32)
    tangent = jax.tree.map(jnp.ones_like, layers)

    def derivative(backward):
        run = lambda x: network(RLS, backward, scan)(x, state).stream  # noqa: E731
        return lambda x, tangent: jax.jvp(run, (x,), (tangent,))

    with pytest.raises(TypeError, match=r"reversible.*remat.*mixer\.backward"):
        derivative("reversible")(layers, tangent)
    remat, stored = (jax.jit(derivative(backward))(layers, tangent) for backward in ("remat", "stored"))
    # A few roundings: the same operations, compiled with other fused multiply-adds.
    assert worst(remat, stored) < 1e-6


def test_reversible_requires_undo():
    with pytest.raises(ValueError, match="undo is None"):
        depth_scan(lambda layer, state: (state, None), jnp.ones(2), jnp.ones(3), backward=Backward.REVERSIBLE)


def test_memory_grows_by_the_residuals():
    # M is 16 times as large as the stream. Growth of the compiled program's memory per layer, in units of the stream.
    tokens, key_dim, value_dim = 64, 16, 8

    def layers(depth):
        shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        parts = shape(depth, key_dim), shape(depth, value_dim), shape(depth), shape(depth)
        return Layer(parts[0], Observation(*parts))

    def temporary_bytes(backward, depth):
        def loss(scale, layers):
            step, undo = step_and_undo(RLS, scale)
            state = State(jnp.ones(value_dim), RLS.init(value_dim, key_dim, ALPHA))
            state = jax.tree.map(lambda x: jnp.broadcast_to(x, (tokens, *x.shape)), state)
            over = jax.vmap(step, in_axes=(None, 0)), jax.vmap(undo, in_axes=(None, 0, 0))
            return jnp.sum(depth_scan(over[0], state, layers, backward=Backward(backward), undo=over[1]).stream)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        compiled = gradient.lower(jax.ShapeDtypeStruct((value_dim,), jnp.float32), layers(depth)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def slope(backward):
        return (temporary_bytes(backward, 24) - temporary_bytes(backward, 12)) / 12 / (tokens * value_dim * 4)

    residual = 2 + (key_dim + 1) / value_dim  # the stream, e, u and s
    assert slope("reversible") < residual + 0.5
    assert slope("remat") > 16


@functools.cache
def cache_gradient(backward, scan):
    """The gradient of a network whose layers read a weighted sum of all earlier outputs, and append their own."""

    def step(layer, state):
        stream, cache = state
        written = len(cache.entries) if isinstance(cache, GrowingCache) else layer.shape[0]
        weights = cache.each(lambda entry, weight: weight, layer[:written]) if written else ()
        read = cache.weighted_sum(weights, lambda entry: entry) if written else 0 * stream
        output = jnp.tanh(stream + read)
        return (stream + output, cache.append(output)), stream

    undo = lambda layer, state, residual: (residual, state[1].without_last())  # noqa: E731

    def loss(weights, scale):
        cache = StackedCache.empty(len(weights), scale) if scan else GrowingCache()
        stream, _ = depth_scan(step, (scale, cache), weights, backward=Backward(backward), undo=undo, scan=scan)
        return jnp.sum(jnp.sin(stream))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@each_mode
def test_a_cache_is_restored_without_a_residual(rng, x64, backward, scan):
    depth, scale = 4, jnp.linspace(0.1, 1, VALUE)
    weights = jnp.asarray(rng.normal(size=(depth, depth)))
    actual = cache_gradient(backward, scan)(weights, scale)
    outputs, stream = [], np.asarray(scale)
    for row in np.asarray(weights):
        output = np.tanh(stream + sum((w * o for w, o in zip(row, outputs, strict=False)), np.zeros(VALUE)))
        stream = stream + output
        outputs.append(output)
    np.testing.assert_allclose(actual[0], np.sum(np.sin(stream)), rtol=1e-12)
    assert worst(actual, cache_gradient("stored", True)(weights, scale)) < 1e-12


def final_state(observations):
    init = partial(RLS.init, dtype=jnp.float64)
    return depth_memory_loop(observations, VALUE, KEY, ALPHA, write=RLS.write, init=init)


def read_by_memory(observations, query):
    return rls_read(final_state(observations)[0], query)


def read_by_weights(observations, query):
    return dual_read(final_state(observations)[1], query, observations)[0]


value_and_jacobian = {
    read: jax.jit(lambda *args, read=read: (read(*args), jax.jacrev(read, argnums=(0, 1))(*args)))
    for read in (read_by_memory, read_by_weights)
}
weighted_read = jax.jit(lambda observations, query: dual_read(final_state(observations)[1], query, observations))


@pytest.mark.parametrize("name", GATES)
def test_dual_read_equals_the_read_in_values_and_gradients(rng, x64, name):
    layers = gated_layers(rng, name, jnp.float64)
    arguments = layers.observation, layers.query[0]
    expected, actual = (run(*arguments) for run in value_and_jacobian.values())
    assert worst(actual, expected) < 1e-10
    value, weights = weighted_read(*arguments)
    # The weighted sum may cancel, so the error is relative to the sum of absolute values.
    scale = np.abs(weights) @ np.abs(arguments[0].value)
    assert np.all(np.abs(weights @ arguments[0].value - value) < 1e-13 * scale)


def test_sharded_tokens():
    script = Path(__file__).parent / "sharded_scan.py"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_unknown_backward_mode(rng, unchecked_annotations):
    layers = random_layers(rng, jnp.float32, depth=2)
    step, undo = step_and_undo(RLS, 1.0)
    for backward in ("undo", "", None, 3):
        with pytest.raises(ValueError, match=rf"backward is {backward!r}.*stored, remat, reversible"):
            depth_scan(step, start(RLS, jnp.float32), layers, backward=backward, undo=undo)
    with pytest.raises(ValueError, match=r"layers has leaves of shapes"):
        depth_scan(step, start(RLS, jnp.float32), (layers, 1.0))


@pytest.mark.parametrize("scan", [True, False])
def test_undo_must_return_the_type_of_the_state(rng, unchecked_annotations, scan):
    layers = random_layers(rng, jnp.float32, depth=2)
    step, undo = step_and_undo(RLS, 1.0)
    for wrong in (
        lambda *arguments: None,
        lambda *arguments: undo(*arguments)._replace(stream=jnp.zeros(VALUE + 1)),
        lambda *arguments: undo(*arguments)._replace(stream=jnp.zeros(VALUE, jnp.bfloat16)),
    ):
        with pytest.raises(ValueError, match="undo returns"):
            depth_scan(step, start(RLS, jnp.float32), layers, backward=Backward.REVERSIBLE, undo=wrong, scan=scan)


@pytest.mark.parametrize(("start_state", "scan"), [(1, True), (1.0, True), (1, False), (np.int32(1), False)])
def test_reversible_promotes_the_first_state_as_stored_does(unchecked_annotations, start_state, scan):
    def value_and_gradient(backward):
        step = lambda layer, state: (state * layer + 1.0, ())  # noqa: E731
        undo = lambda layer, state, residual: (state - 1.0) / layer  # noqa: E731
        run = lambda layers: depth_scan(step, start_state, layers, backward=backward, undo=undo, scan=scan)  # noqa: E731
        return jax.value_and_grad(run)(jnp.array([2.0, 4.0]))

    with jax.numpy_dtype_promotion("standard"):
        gradients = [value_and_gradient(backward)[1] for backward in ("reversible", "stored")]
    np.testing.assert_allclose(*gradients, rtol=1e-6)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_must_have_one_depth(scan):
    with pytest.raises(ValueError, match=r"layers.*\(3,\), \(2,\)"):
        depth_scan(lambda layer, state: (state, ()), jnp.ones(()), (jnp.ones(3), jnp.ones(2)), scan=scan)
