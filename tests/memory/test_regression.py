"""The regression's objective, against its formula and its batch minimiser."""

import jax
import numpy as np
import pytest

from depth_problems import cast, random_observations, relative
from ldm_jax import regression_objective, solve_depth_regression

objective = jax.jit(regression_objective)
gradient = jax.jit(jax.grad(regression_objective))
solve = jax.jit(solve_depth_regression)

ALPHA = 3.0
pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def observations(rng):
    return cast(random_observations(rng, 12, 3, 4, forgetting=(0.7, 1.0)), np.float64)


def test_objective_against_its_formula(rng, observations):
    M = rng.normal(size=(3, 4))
    key, value, forgetting, importance = observations
    expected = np.prod(forgetting) / ALPHA * np.sum(M**2)
    for i in range(12):
        error = value[i] - M @ key[i]
        expected += np.prod(forgetting[i + 1 :]) * importance[i] * error @ error
    # A sum of positive terms: a few roundings.
    np.testing.assert_allclose(objective(M, observations, ALPHA), expected, rtol=1e-13)


def test_gradient_vanishes_at_the_solution(observations):
    M, _ = solve(observations, ALPHA)
    # The gradient at M = 0 has the size of the terms that cancel.
    scale = np.max(np.abs(gradient(np.zeros_like(M), observations, ALPHA)))
    assert np.max(np.abs(gradient(M, observations, ALPHA))) < 1e-13 * scale


def test_objective_grows_from_the_solution_as_given_by_the_covariance(rng, observations):
    M, P = solve(observations, ALPHA)
    step = rng.normal(size=M.shape)
    growth = objective(M + step, observations, ALPHA) - objective(M, observations, ALPHA)
    # J is quadratic, so the equality is exact. The inverse of P loses its condition number, below 1e3, in roundings.
    np.testing.assert_allclose(growth, np.trace(step @ np.linalg.inv(P) @ step.T), rtol=1e-11)


def test_without_ridge_it_is_least_squares(rng):
    observations = random_observations(rng, 12, 3, 4, forgetting=1.0, importance=1.0)
    key, value = observations.key.astype(np.float64), observations.value.astype(np.float64)
    M, _ = solve(cast(observations, np.float64), 1e12)
    # The difference is that of the ridge, 1e-12, times the norm of P.
    assert relative(M, np.linalg.lstsq(key, value, rcond=None)[0].T) < 1e-10
