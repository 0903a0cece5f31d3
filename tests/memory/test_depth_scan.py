"""The scan over layers: three ways back, one gradient, whatever the gates and whatever it is nested in."""

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

from depth_problems import FORMS, RLS, random_observations
from ldm_jax import Backward, Observation, depth_scan, dual_read, rls_read
from ldm_jax.memory.depth_cache import GrowingCache, StackedCache

DEPTH, VALUE, KEY, ALPHA = 96, 3, 4, 2.0
WAYS = [
    ("stored", False), ("remat", True), ("remat", False), ("reversible", True), ("reversible", False)
]  # fmt: skip


class Layer(NamedTuple):
    """Every layer reads what the earlier ones wrote, and writes what it makes of that."""

    query: jax.Array
    observation: Observation


class State(NamedTuple):
    stream: jax.Array
    memory: tuple[jax.Array, jax.Array]


def step_and_undo(form, scale):
    """`scale` is closed over."""

    def step(layer, state):
        x = 0.3 * state.stream + rls_read(state.memory[0], layer.query)
        output = layer.observation.value + 0.2 * scale * jnp.tanh(x)
        observation = layer.observation._replace(value=output)
        correction = form.correction(*state.memory, observation)
        after = State(0.7 * state.stream + output, form.apply(*state.memory, correction, observation))
        return after, (state.stream, correction)

    def undo(layer, state, kept):
        stream, correction = kept
        observation = layer.observation._replace(value=correction.error)  # no undo looks at the value
        return State(stream, form.undo(*state.memory, correction, observation))

    return step, undo


def network(form, backward, scan, scale=1.0):
    """`(layers, initial state) -> final state`."""
    step, undo = step_and_undo(form, scale)
    return lambda layers, state: depth_scan(step, state, layers, backward=Backward(backward), undo=undo, scan=scan)


def problem(rng, dtype, depth=DEPTH, **options):
    observations = random_observations(rng, depth, VALUE, KEY, **options)
    query = rng.normal(size=(depth, KEY)).astype(np.float32)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), Layer(query, observations))


def start(form, dtype):
    return State(jnp.linspace(-1, 1, VALUE, dtype=dtype), form.init(VALUE, KEY, ALPHA, dtype))


@partial(jax.jit, static_argnums=(0, 1, 2))
def loss_and_gradient(form, backward, scan, layers, state, scale):
    def loss(layers, state, scale):
        stream, (memory, _) = network(form, backward, scan, scale)(layers, state)
        return jnp.sum(jnp.sin(stream)) + jnp.sum(jnp.cos(memory))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(layers, state, scale)


def worst(actual, expected):
    """Over the leaves: the norm of the difference over the norm of what is expected.

    Leaves a thousand times smaller than the largest (the initial state, forgotten since) count as that large.
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


def gates(rng, name, dtype):
    options = dict(GATES[name])
    extreme = options.pop("importance", None)
    layers = problem(rng, dtype, **options)
    if extreme:
        importance = jnp.asarray(rng.choice([0.0, 1.0, 1e3], size=DEPTH), dtype)
        layers = layers._replace(observation=layers.observation._replace(importance=importance))
    return layers


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("form", FORMS)
def test_undone_equals_stored_at_extreme_gates(rng, x64, form, name, record_property):
    form = FORMS[form]
    layers = gates(rng, name, jnp.float64)
    expected = loss_and_gradient(form, "stored", True, layers, start(form, jnp.float64), 1.0)
    actual = loss_and_gradient(form, "reversible", True, layers, start(form, jnp.float64), 1.0)
    assert worst(actual, expected) < 1e-10

    # float32: undone against stored, over the whole gradient, which is what an optimiser is given. Where all keys are
    # one, forgetting has inflated P a thousand times in the other directions, and stored itself is off by more.
    single = jax.tree.map(lambda x: x.astype(jnp.float32), layers)
    stored, undone = (
        loss_and_gradient(form, way, True, single, start(form, jnp.float32), jnp.float32(1))
        for way in ("stored", "reversible")
    )
    record_property(
        "float32", f"undone {whole(undone, stored):.1e}, stored against float64 {worst(stored, expected):.1e}"
    )
    if name != "identical keys":
        assert whole(undone, stored) < 1e-5
    # Every leaf by itself: the write is gone through once more, so a few times what stored loses against float64.
    assert worst(undone, expected) < 1e-5 + 4 * worst(stored, expected)


@pytest.mark.parametrize(("backward", "scan"), WAYS)
def test_every_way_has_the_same_gradient(rng, x64, backward, scan):
    layers = problem(rng, jnp.float64, depth=6)
    expected = loss_and_gradient(RLS, "stored", True, layers, start(RLS, jnp.float64), 0.7)
    actual = loss_and_gradient(RLS, backward, scan, layers, start(RLS, jnp.float64), 0.7)
    assert worst(actual, expected) < 1e-12


def test_what_undo_returns_is_the_state_before(rng):
    # The final cotangent is pulled through the restored states: the first one must be the initial one.
    form, seen = RLS, []
    layers = problem(rng, jnp.float32, depth=48)

    def step(layer, state):
        correction = form.correction(*state, layer.observation)
        return form.apply(*state, correction, layer.observation), correction

    def undo(layer, state, kept):
        before = form.undo(*state, kept, layer.observation)
        jax.debug.callback(lambda m: seen.append(np.abs(m).max()), before[0])
        return before

    run = lambda state: jnp.sum(depth_scan(step, state, layers, backward=Backward.REVERSIBLE, undo=undo)[0])  # noqa: E731
    memory, inverse_covariance = form.init(VALUE, KEY, ALPHA)
    jax.block_until_ready(jax.grad(lambda p: run((memory, p)))(inverse_covariance))
    jax.effects_barrier()
    assert len(seen) == 48
    assert min(seen) < 3e-7 * max(seen)  # M starts at 0, and comes back to a rounding of the largest M


def test_under_vmap_jit_and_checkpoint(rng, x64):
    layers = [problem(rng, jnp.float64, depth=5) for _ in range(3)]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    state = start(RLS, jnp.float64)

    def loss(layers, backward):
        run = network(RLS, backward, True)
        return jnp.sum(jnp.sin(jax.checkpoint(run)(layers, state).stream))

    expected = [jax.grad(lambda one: loss(one, "stored"))(one) for one in layers]
    batched = jax.jit(jax.vmap(jax.grad(lambda one: loss(one, "reversible"))))(batch)
    for index, one in enumerate(expected):
        assert worst(jax.tree.map(lambda x, index=index: x[index], batched), one) < 1e-12

    # vmap inside, gradient outside, over a closed-over batched array
    def total(scale, backward):
        over = jax.vmap(lambda one, scale: network(RLS, backward, True, scale)(one, state).stream)
        return jnp.sum(over(batch, scale))

    scale = jnp.array([0.3, 1.0, 2.0])
    assert worst(jax.grad(total)(scale, "reversible"), jax.grad(total)(scale, "stored")) < 1e-12


@pytest.mark.parametrize("scan", [True, False])
def test_integers_and_closed_over_arrays(x64, scan):
    # An integer per layer picks a row of a closed-over table; an integer in the state counts; a key is closed over.
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

        undo = lambda layer, state, kept: (kept, state[1] - 1)  # noqa: E731
        state = jnp.ones(3), jnp.zeros((), jnp.int32)
        return jnp.sum(depth_scan(step, state, layers, backward=Backward(backward), undo=undo, scan=scan)[0])

    def gradient(backward):
        of = lambda table, weight: run(backward, table, layers | {"weight": weight})  # noqa: E731
        return jax.jit(jax.grad(of, argnums=(0, 1)))(table, layers["weight"])

    assert worst(gradient("reversible"), gradient("stored")) < 1e-12


@pytest.mark.parametrize("scan", [True, False])
def test_forward_mode_names_recomputed(rng, scan):
    layers, state = problem(rng, jnp.float32, depth=3), start(RLS, jnp.float32)
    tangent = jax.tree.map(jnp.ones_like, layers)
    with pytest.raises(TypeError, match="remat"):
        jax.jvp(lambda x: network(RLS, "reversible", scan)(x, state).stream, (layers,), (tangent,))
    by_recomputed, by_stored = (
        jax.jvp(lambda x, way=way: network(RLS, way, scan)(x, state).stream, (layers,), (tangent,))
        for way in ("remat", "stored")
    )
    assert worst(by_recomputed, by_stored) < 1e-6


def test_undone_needs_an_undo():
    with pytest.raises(ValueError, match="there is no undo"):
        depth_scan(lambda layer, state: (state, None), jnp.ones(2), jnp.ones(3), backward=Backward.REVERSIBLE)


def test_memory_grows_by_what_is_kept():
    # Wide keys: M is 16 times the stream. Slopes of compiled memory per layer, in units of the stream's bytes.
    tokens, key_dim, value_dim = 64, 16, 8

    def layers(depth):
        numbers = jnp.ones((depth, key_dim)), jnp.ones((depth, value_dim)), jnp.ones(depth), jnp.ones(depth)
        return Layer(numbers[0], Observation(*numbers))

    def temporary_bytes(backward, depth):
        def loss(scale, layers):
            step, undo = step_and_undo(RLS, scale)
            state = State(jnp.ones(value_dim), RLS.init(value_dim, key_dim, ALPHA))
            state = jax.tree.map(lambda x: jnp.broadcast_to(x, (tokens, *x.shape)), state)
            over = jax.vmap(step, in_axes=(None, 0)), jax.vmap(undo, in_axes=(None, 0, 0))
            return jnp.sum(depth_scan(over[0], state, layers, backward=Backward(backward), undo=over[1]).stream)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        compiled = gradient.lower(jnp.ones(value_dim), layers(depth)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def slope(way):
        return (temporary_bytes(way, 24) - temporary_bytes(way, 12)) / 12 / (tokens * value_dim * 4)

    kept = 2 + (key_dim + 1) / value_dim  # the stream, e, u and s
    assert slope("reversible") < kept + 0.5
    assert slope("remat") > 16
    assert slope("stored") > 2 * 16


@pytest.mark.parametrize(("backward", "scan"), WAYS)
def test_a_cache_is_restored_with_nothing_saved(rng, x64, backward, scan):
    # Every layer reads a weighted sum of all earlier outputs, and appends its own.
    depth = 7
    weights = jnp.asarray(rng.normal(size=(depth, depth)))

    def step(layer, state):
        stream, cache = state
        written = len(cache.entries) if isinstance(cache, GrowingCache) else depth
        weights = cache.each(lambda entry, weight: weight, layer[:written]) if written else ()
        read = cache.weighted_sum(weights, lambda entry: entry) if written else 0 * stream
        output = jnp.tanh(stream + read)
        return (stream + output, cache.append(output)), stream

    undo = lambda layer, state, kept: (kept, state[1].without_last())  # noqa: E731

    def loss(weights, scale, backward, scan):
        cache = StackedCache.empty(depth, scale) if scan else GrowingCache()
        stream, _ = depth_scan(step, (scale, cache), weights, backward=Backward(backward), undo=undo, scan=scan)
        return jnp.sum(jnp.sin(stream))

    scale = jnp.linspace(0.1, 1, VALUE)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=(2, 3))
    actual = gradient(weights, scale, backward, scan)
    outputs, stream = [], np.asarray(scale)
    for row in np.asarray(weights):
        output = np.tanh(stream + sum((w * o for w, o in zip(row, outputs, strict=False)), np.zeros(VALUE)))
        stream = stream + output
        outputs.append(output)
    np.testing.assert_allclose(actual[0], np.sum(np.sin(stream)), rtol=1e-12)
    assert worst(actual, gradient(weights, scale, "stored", True)) < 1e-12


@pytest.mark.parametrize("name", GATES)
def test_dual_read_equals_the_memory_in_values_and_gradients(rng, x64, name):
    layers = gates(rng, name, jnp.float64)

    def final(observations):
        state = RLS.init(VALUE, KEY, ALPHA, jnp.float64)
        return jax.lax.scan(lambda s, o: (RLS.write(*s, o), None), state, observations)[0]

    def by_memory(observations, query):
        return rls_read(final(observations)[0], query)

    def by_weights(observations, query):
        return dual_read(final(observations)[1], query, observations)[0]

    arguments = layers.observation, layers.query[0]
    expected, actual = (
        jax.jit(lambda *args, read=read: (read(*args), jax.jacrev(read, argnums=(0, 1))(*args)))(*arguments)
        for read in (by_memory, by_weights)
    )
    assert worst(actual, expected) < 1e-10
    value, weights = dual_read(final(arguments[0])[1], arguments[1], arguments[0])
    np.testing.assert_allclose(weights @ arguments[0].value, value, rtol=1e-9)


def test_sharded_tokens():
    script = Path(__file__).parent / "sharded_scan.py"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sharded: the same"


def test_a_way_that_there_is_not(rng, unchecked_annotations):
    layers = problem(rng, jnp.float32, depth=2)
    step, undo = step_and_undo(RLS, 1.0)
    for way in ("undo", "", None, 3):
        with pytest.raises(ValueError, match=r"backward is .*must be one of stored, remat, reversible"):
            depth_scan(step, start(RLS, jnp.float32), layers, backward=way, undo=undo)
    with pytest.raises(ValueError, match="layers has a scalar leaf"):
        depth_scan(step, start(RLS, jnp.float32), (layers, 1.0))


@pytest.mark.parametrize("scan", [True, False])
def test_an_undo_that_returns_something_else(rng, unchecked_annotations, scan):
    layers = problem(rng, jnp.float32, depth=2)
    step, undo = step_and_undo(RLS, 1.0)
    for wrong in (
        lambda *arguments: None,
        lambda *arguments: undo(*arguments)._replace(stream=jnp.zeros(VALUE + 1)),
        lambda *arguments: undo(*arguments)._replace(stream=jnp.zeros(VALUE, jnp.bfloat16)),
    ):
        with pytest.raises(ValueError, match=r"undo returns .*, but the state before the step is"):
            depth_scan(step, start(RLS, jnp.float32), layers, backward=Backward.REVERSIBLE, undo=wrong, scan=scan)
