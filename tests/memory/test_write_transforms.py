"""The writes under jit, vmap, scan and checkpoint equal a plain Python loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import FORMS, each_state, random_observations, relative
from ldm_jax import Observation, additive_write, delta_write, rls_read

DEPTH, BATCH, GROUPS, VALUE, KEY = 5, 3, 2, 3, 4
WRITES = {
    "rls": FORMS["rls"].write,
    "sqrt": FORMS["sqrt"].write,
    "additive": additive_write,
    "delta": delta_write,
}
each_write = pytest.mark.parametrize("name", WRITES)
TOLERANCE = 1e-6  # a few float32 roundings: compiled code contracts products and sums


def start(name):
    return FORMS["sqrt" if name == "sqrt" else "rls"].init(VALUE, KEY, 2.0)


def python_loop(write, state, observations):
    for observation in zip(*observations, strict=True):
        state = write(*state, Observation(*observation))
    return state


@pytest.fixture
def observations(rng):
    return random_observations(rng, DEPTH, VALUE, KEY, forgetting=(0.7, 1.0), importance=(0.2, 1.0))


def assert_close(actual, expected):
    for actual_part, expected_part in zip(actual, expected, strict=True):
        assert actual_part.shape == expected_part.shape
        assert relative(actual_part, expected_part) < TOLERANCE


@each_write
def test_jit(name, observations):
    expected = python_loop(WRITES[name], start(name), observations)
    assert_close(python_loop(jax.jit(WRITES[name]), start(name), observations), expected)


@pytest.fixture
def many(rng):
    """Key `[B, G, K]`, value `[B, G, V]`, forgetting `[G]`, importance `[B, G]`, each with a leading depth axis."""
    key, value, _, importance = random_observations(rng, DEPTH * BATCH * GROUPS, VALUE, KEY, importance=(0.2, 1.0))
    shape = DEPTH, BATCH, GROUPS
    forgetting = rng.uniform(0.7, 1, size=(DEPTH, GROUPS)).astype(np.float32)
    return Observation(key.reshape(*shape, KEY), value.reshape(*shape, VALUE), forgetting, importance.reshape(shape))


@each_write
def test_vmap_over_groups_and_batch(name, many):
    write = jax.jit(
        jax.vmap(
            jax.vmap(WRITES[name], in_axes=(0, 0, Observation(0, 0, 0, 0))),  # groups
            in_axes=(0, 0, Observation(0, 0, None, 0)),  # the batch shares each group's forgetting
        )
    )
    state = tuple(jnp.broadcast_to(part, (BATCH, GROUPS, *part.shape)) for part in start(name))
    M, P = python_loop(write, state, many)
    for b, g in np.ndindex(BATCH, GROUPS):
        one = Observation(many.key[:, b, g], many.value[:, b, g], many.forgetting[:, g], many.importance[:, b, g])
        assert_close((M[b, g], P[b, g]), python_loop(WRITES[name], start(name), one))


@pytest.mark.parametrize("name", FORMS)
def test_vmap_of_a_write_undone(name, many):
    form = FORMS[name]
    correct = jax.jit(jax.vmap(jax.vmap(form.correction), in_axes=(0, 0, Observation(0, 0, None, 0))))
    apply, undo = (
        jax.jit(jax.vmap(jax.vmap(function), in_axes=(0, 0, 0, Observation(0, 0, None, 0))))
        for function in (form.apply, form.undo)
    )
    state = tuple(jnp.broadcast_to(part, (BATCH, GROUPS, *part.shape)) for part in start(name))
    first, second = (Observation(*(part[depth] for part in many)) for depth in (0, 1))
    before = apply(*state, correct(*state, first), first)
    correction = correct(*before, second)
    assert_close(undo(*apply(*before, correction, second), correction, second), before)


def test_vmap_of_the_read(rng):
    M, queries = (rng.normal(size=(BATCH, GROUPS, *shape)).astype(np.float32) for shape in ((VALUE, KEY), (KEY,)))
    expected = np.einsum("BGVK,BGK->BGV", M, queries)
    assert relative(jax.vmap(jax.vmap(rls_read))(M, queries), expected) < TOLERANCE


def test_checkpoint_gives_equal_values_and_gradients(rng, observations):
    weight = rng.normal(size=(VALUE, KEY)).astype(np.float32)

    def loss(write, observations):
        M, P = each_state(write, start("rls"), observations)
        return jnp.sum(weight * jnp.sin(M)) + jnp.sum(jnp.sin(P))

    gradient_of = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    value, gradient = gradient_of(jax.checkpoint(WRITES["rls"]), observations)
    expected, expected_gradient = gradient_of(WRITES["rls"], observations)
    np.testing.assert_allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert_close(gradient, expected_gradient)
