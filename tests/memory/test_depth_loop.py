"""The loop over given observations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import FORMS, random_observations, relative
from ldm_jax import Observation, additive_write, delta_write, depth_memory_loop, init_state

RLS, SQRT = FORMS["rls"], FORMS["sqrt"]


@pytest.fixture
def observations(rng):
    return random_observations(rng, 7, 3, 4, forgetting=(0.7, 1.0), importance=(0.2, 1.0))


@pytest.mark.parametrize(("write", "init"), [(RLS.write, RLS.init), (SQRT.write, SQRT.init), (delta_write, RLS.init)])
def test_against_a_python_loop(observations, write, init):
    M, P = init(3, 4, 2.0)
    for observation in zip(*observations, strict=True):
        M, P = write(M, P, Observation(*observation))
    actual = depth_memory_loop(observations, 3, 4, 2.0, write=write, init=init)
    # A few float32 roundings: the loop is compiled as one.
    assert relative(actual[0], M) < 1e-6
    assert relative(actual[1], P) < 1e-6


def test_default_is_recursive_least_squares(observations):
    actual = depth_memory_loop(observations, 3, 4, 2.0)
    expected = depth_memory_loop(observations, 3, 4, 2.0, write=RLS.write, init=RLS.init)
    for actual_part, expected_part in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(actual_part, expected_part)


@pytest.mark.parametrize("form", [RLS, SQRT], ids=["rls", "sqrt"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_without_observations_it_is_the_start(form, wrap):
    empty = Observation(np.zeros((0, 4)), np.zeros((0, 3)), np.zeros(0), np.zeros(0))
    M, P = wrap(lambda observations: depth_memory_loop(observations, 3, 4, 4.0, form.write, form.init))(empty)
    # To the bit: the square root of 4 is exact.
    np.testing.assert_array_equal(M, np.zeros((3, 4)))
    np.testing.assert_array_equal(form.covariance(np.asarray(P)), 4 * np.eye(4))


def test_custom_write(observations):
    def keep_the_last(memory, inverse_covariance, observation):
        return jnp.outer(observation.value, observation.key), inverse_covariance + observation.importance

    M, P = depth_memory_loop(observations, 3, 4, 1.0, write=keep_the_last)
    np.testing.assert_array_equal(M, np.outer(observations.value[-1], observations.key[-1]))
    # A sum of seven numbers of order 1.
    np.testing.assert_allclose(P, np.eye(4) + observations.importance.sum(), rtol=1e-6)


def test_custom_start(rng, observations):
    M0 = rng.normal(size=(3, 4)).astype(np.float32)

    def init(value_dim, key_dim, alpha):
        return jnp.asarray(M0), alpha * jnp.eye(key_dim)

    M, _ = depth_memory_loop(observations, 3, 4, 1.0, write=additive_write, init=init)
    from_zero, _ = depth_memory_loop(observations, 3, 4, 1.0, write=additive_write)
    # Additive memory is linear in its start, which is forgotten by the product of all forgetting.
    np.testing.assert_allclose(M - from_zero, np.prod(observations.forgetting) * M0, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_float64_state(observations):
    init = partial(init_state, dtype=jnp.float64)
    M, P = jax.eval_shape(lambda alpha: depth_memory_loop(observations, 3, 4, alpha, init=init), 1.0)
    assert M.dtype == P.dtype == jnp.float64
