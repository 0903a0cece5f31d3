"""The memories without a covariance, against plain NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import cast, random_observations
from ldm_jax import additive_write, delta_write, depth_memory_loop, init_state, rls_read

pytestmark = pytest.mark.usefixtures("x64")
init64 = partial(init_state, dtype=jnp.float64)


@partial(jax.jit, static_argnames="write")
def remember(write, observations):
    return depth_memory_loop(
        observations, observations.value.shape[1], observations.key.shape[1], 2.0, write=write, init=init64
    )


def test_additive_is_the_sum_of_outer_products(rng):
    observations = cast(random_observations(rng, 24, 3, 4, forgetting=1.0, importance=1.0), np.float64)
    M, _ = remember(additive_write, observations)
    # 24 terms of order 1 in another order.
    np.testing.assert_allclose(M, observations.value.T @ observations.key, rtol=0, atol=1e-13)


def additive(memory, key, value, forgetting, importance):
    return forgetting * memory + importance * value[:, None] * key


def delta(memory, key, value, forgetting, importance):
    faded = forgetting * memory
    return faded + importance * (value - faded @ key)[:, None] * key


@pytest.mark.parametrize(("write", "plain"), [(additive_write, additive), (delta_write, delta)])
def test_against_a_plain_loop(rng, write, plain):
    observations = cast(random_observations(rng, 24, 3, 4, forgetting=(0.7, 1.0), importance=(0.0, 1.0)), np.float64)
    M = np.zeros((3, 4))
    for parts in zip(*observations, strict=True):
        M = plain(M, *parts)
    # 24 writes of order 1, each rounded differently.
    np.testing.assert_allclose(remember(write, observations)[0], M, rtol=0, atol=1e-13)


@pytest.mark.parametrize("write", [additive_write, delta_write])
def test_the_covariance_is_left_alone(rng, write):
    observations = cast(random_observations(rng, 24, 3, 4), np.float64)
    np.testing.assert_array_equal(remember(write, observations)[1], 2 * np.eye(4))


@pytest.fixture
def one_key(rng):
    """One key throughout, with a new value at every depth."""
    observations = cast(random_observations(rng, 24, 3, 4, forgetting=(0.7, 1.0), importance=1.0), np.float64)
    key = observations.key[0] / np.linalg.norm(observations.key[0])
    return observations._replace(key=np.broadcast_to(key, (24, 4)))


def test_delta_rule_overwrites_the_value_of_a_repeated_key(one_key):
    M, _ = remember(delta_write, one_key)
    # k'k is 1 up to a rounding, so nothing of the earlier values is left.
    np.testing.assert_allclose(rls_read(M, one_key.key[0]), one_key.value[-1], rtol=0, atol=1e-14)


def test_additive_adds_up_the_values_of_a_repeated_key(one_key):
    M, _ = remember(additive_write, one_key._replace(forgetting=np.ones(24)))
    # A sum of 24 values of order 1.
    np.testing.assert_allclose(rls_read(M, one_key.key[0]), one_key.value.sum(0), rtol=0, atol=1e-13)
