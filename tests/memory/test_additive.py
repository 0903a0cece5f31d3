"""The writes additive and delta, against plain NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import cast, random_observations, relative
from ldm_jax import additive_write, delta_write, depth_memory_loop, init_state, rls_read

pytestmark = pytest.mark.usefixtures("x64")
init64 = partial(init_state, dtype=jnp.float64)

# 24 writes, and at most as many roundings of 1.1e-16 relative to the largest values.
TOLERANCE = 1e-14


@partial(jax.jit, static_argnames="write")
def final_state(write, observations):
    return depth_memory_loop(
        observations, observations.value.shape[1], observations.key.shape[1], 2.0, write=write, init=init64
    )


def test_additive_is_the_sum_of_outer_products(rng):
    observations = cast(random_observations(rng, 24, 3, 4, forgetting=1.0, importance=1.0), np.float64)
    M, _ = final_state(additive_write, observations)
    assert relative(M, observations.value.T @ observations.key) < TOLERANCE


def additive(memory, key, value, forgetting, importance):
    return forgetting * memory + importance * value[:, None] * key


def delta(memory, key, value, forgetting, importance):
    discounted = forgetting * memory
    return discounted + importance * (value - discounted @ key)[:, None] * key


@pytest.mark.parametrize(("write", "reference"), [(additive_write, additive), (delta_write, delta)])
def test_against_a_python_loop(rng, write, reference):
    observations = cast(random_observations(rng, 24, 3, 4, forgetting=(0.7, 1.0), importance=(0.0, 1.0)), np.float64)
    M = np.zeros((3, 4))
    for parts in zip(*observations, strict=True):
        M = reference(M, *parts)
    assert relative(final_state(write, observations)[0], M) < TOLERANCE


@pytest.mark.parametrize("write", [additive_write, delta_write])
def test_the_inverse_covariance_is_unchanged(rng, write):
    observations = cast(random_observations(rng, 24, 3, 4), np.float64)
    np.testing.assert_array_equal(final_state(write, observations)[1], 2 * np.eye(4))


@pytest.fixture
def one_key(rng):
    """Observations with the same key and different values."""
    observations = cast(random_observations(rng, 24, 3, 4, forgetting=(0.7, 1.0), importance=1.0), np.float64)
    key = observations.key[0] / np.linalg.norm(observations.key[0])
    return observations._replace(key=np.broadcast_to(key, (24, 4)))


def test_delta_rule_overwrites_the_value_of_a_repeated_key(one_key):
    M, _ = final_state(delta_write, one_key)
    # k'k is 1 up to a rounding, so only a rounding of the earlier values remains.
    assert relative(rls_read(M, one_key.key[0]), one_key.value[-1], np.max(np.abs(one_key.value))) < TOLERANCE


def test_additive_write_sums_the_values_of_a_repeated_key(one_key):
    M, _ = final_state(additive_write, one_key._replace(forgetting=np.ones(24)))
    # The sum may cancel, so the error is relative to the sum of the absolute values.
    scale = np.max(np.abs(one_key.value).sum(0))
    assert relative(rls_read(M, one_key.key[0]), one_key.value.sum(0), scale) < TOLERANCE
