"""The writes under jit, vmap, scan and checkpoint equal a Python loop."""

from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import RLS, each_regression, each_write, every_state, python_loop, random_observations, relative
from ldm_jax import Observation, rls_read

DEPTH, BATCH, GROUPS, VALUE, KEY = 5, 3, 2, 3, 4
TOLERANCE = 1e-6  # a few float32 roundings: compiled programs may use other fused multiply-adds


def start(write):
    return write.init(VALUE, KEY, 2.0)


@pytest.fixture
def observations(rng):
    return random_observations(rng, DEPTH, VALUE, KEY, forgetting=(0.7, 1.0), importance=(0.2, 1.0))


def assert_close(actual, expected):
    for actual_part, expected_part in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert relative(actual_part, expected_part) < TOLERANCE


@each_write
def test_jit(write, observations):
    expected = python_loop(write.write, start(write), observations)
    assert_close(python_loop(jax.jit(write.write), start(write), observations), expected)


@pytest.fixture
def grouped_observations(rng):
    """Key `[B, G, K]`, value `[B, G, V]`, forgetting `[G]`, importance `[B, G]`, each with a leading depth axis."""
    key, value, _, importance = random_observations(rng, DEPTH * BATCH * GROUPS, VALUE, KEY, importance=(0.2, 1.0))
    shape = DEPTH, BATCH, GROUPS
    forgetting = rng.uniform(0.7, 1, size=(DEPTH, GROUPS)).astype(np.float32)
    return Observation(key.reshape(*shape, KEY), value.reshape(*shape, VALUE), forgetting, importance.reshape(shape))


def grouped_start(write):
    return jax.tree.map(lambda part: jnp.broadcast_to(part, (BATCH, GROUPS, *part.shape)), start(write))


@each_write
def test_vmap_over_groups_and_batch(write, grouped_observations):
    over_groups = jax.vmap(write.write, in_axes=(0, 0, Observation(0, 0, 0, 0)))
    # The batch shares the forgetting of each group.
    over_batch = jax.jit(jax.vmap(over_groups, in_axes=(0, 0, Observation(0, 0, None, 0))))
    states = python_loop(over_batch, grouped_start(write), grouped_observations)
    key, value, forgetting, importance = grouped_observations
    write_one = jax.jit(write.write)
    for b, g in np.ndindex(BATCH, GROUPS):
        one = Observation(key[:, b, g], value[:, b, g], forgetting[:, g], importance[:, b, g])
        assert_close(jax.tree.map(itemgetter((b, g)), states), python_loop(write_one, start(write), one))


@each_regression
def test_vmap_of_undo(regression, grouped_observations):
    correct = jax.jit(jax.vmap(jax.vmap(regression.correction), in_axes=(0, 0, Observation(0, 0, None, 0))))
    apply, undo = (
        jax.jit(jax.vmap(jax.vmap(function), in_axes=(0, 0, 0, Observation(0, 0, None, 0))))
        for function in (regression.apply, regression.undo)
    )
    state = grouped_start(regression)
    first, second = (Observation(*(part[depth] for part in grouped_observations)) for depth in (0, 1))
    before = apply(*state, correct(*state, first), first)
    correction = correct(*before, second)
    assert_close(undo(*apply(*before, correction, second), correction, second), before)


def test_vmap_of_the_read(rng):
    M, queries = (rng.normal(size=(BATCH, GROUPS, *shape)).astype(np.float32) for shape in ((VALUE, KEY), (KEY,)))
    expected = np.einsum("BGVK,BGK->BGV", M, queries)
    assert relative(jax.vmap(jax.vmap(rls_read))(M, queries), expected) < TOLERANCE


def test_checkpoint_has_the_same_values_and_gradients(rng, observations):
    weight = rng.normal(size=(VALUE, KEY)).astype(np.float32)

    def loss(write, observations):
        M, P = every_state(write, start(RLS), observations)
        return jnp.sum(weight * jnp.sin(M)) + jnp.sum(jnp.sin(P))

    gradient_of = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    value, gradient = gradient_of(jax.checkpoint(RLS.write), observations)
    expected, expected_gradient = gradient_of(RLS.write, observations)
    # The sum of 140 terms of size 1 may cancel, so its error is relative to 10, the root of their number.
    assert relative(value, expected, 10) < TOLERANCE
    assert_close(gradient, expected_gradient)
