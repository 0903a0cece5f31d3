"""`depth_memory_loop`, the scan over given observations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import RLS, each_regression, each_write, python_loop, random_observations, relative
from ldm_jax import Observation, additive_write, depth_memory_loop, init_state


@pytest.fixture
def observations(rng):
    return random_observations(rng, 7, 3, 4, forgetting=(0.7, 1.0), importance=(0.2, 1.0))


@each_write
def test_against_a_python_loop(observations, write):
    expected = python_loop(jax.jit(write.write), write.init(3, 4, 2.0), observations)
    actual = depth_memory_loop(observations, 3, 4, 2.0, write=write.write, init=write.init)
    for actual_part, expected_part in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # A few float32 roundings: compiled loops may use other fused multiply-adds.
        assert relative(actual_part, expected_part) < 1e-6


def test_default_is_recursive_least_squares(observations):
    actual = depth_memory_loop(observations, 3, 4, 2.0)
    expected = depth_memory_loop(observations, 3, 4, 2.0, write=RLS.write, init=RLS.init)
    for actual_part, expected_part in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(actual_part, expected_part)


@each_regression
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_without_observations_it_returns_the_initial_state(regression, wrap):
    empty = Observation(np.zeros((0, 4)), np.zeros((0, 3)), np.zeros(0), np.zeros(0))
    loop = wrap(lambda observations: depth_memory_loop(observations, 3, 4, 4.0, regression.write, regression.init))
    M, P = loop(empty)
    # Exactly: the square root of 4 is exact.
    np.testing.assert_array_equal(M, np.zeros((3, 4)))
    np.testing.assert_array_equal(regression.covariance(P), 4 * np.eye(4))


def test_custom_write(observations):
    def overwrite(memory, inverse_covariance, observation):
        return jnp.outer(observation.value, observation.key), inverse_covariance + observation.importance

    M, P = depth_memory_loop(observations, 3, 4, 1.0, write=overwrite)
    np.testing.assert_array_equal(M, np.outer(observations.value[-1], observations.key[-1]))
    # A sum of seven positive numbers.
    np.testing.assert_allclose(P, np.eye(4) + observations.importance.sum(), rtol=1e-6)


def test_custom_init(rng, observations):
    M0 = rng.normal(size=(3, 4)).astype(np.float32)

    def init(value_dim, key_dim, alpha):
        return jnp.asarray(M0), alpha * jnp.eye(key_dim)

    M, _ = depth_memory_loop(observations, 3, 4, 1.0, write=additive_write, init=init)
    from_zero, _ = depth_memory_loop(observations, 3, 4, 1.0, write=additive_write)
    # The additive memory is linear in its initial state, which is discounted by the product of forgetting. The
    # difference cancels, so the error is relative to M: a rounding of 6e-8 for each of seven writes.
    expected = np.prod(observations.forgetting) * M0
    assert relative(M - from_zero, expected, np.max(np.abs(M))) < 5e-7


@pytest.mark.usefixtures("x64")
def test_float64_state(observations):
    init = partial(init_state, dtype=jnp.float64)
    M, P = jax.eval_shape(lambda alpha: depth_memory_loop(observations, 3, 4, alpha, init=init), 1.0)
    assert M.dtype == P.dtype == jnp.float64
