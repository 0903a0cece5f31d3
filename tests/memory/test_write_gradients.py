"""Derivatives of every write and of the read, against finite differences, and at importance 0."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from depth_problems import RLS, SQRT_RLS, each_regression, each_write, relative
from ldm_jax import Covariance, Observation, rls_read

pytestmark = pytest.mark.usefixtures("x64")

STEP = 1e-5
DIFFERENCES = 1e-7  # truncation STEP^2 = 1e-10 and rounding 1e-16 / STEP = 1e-11, times higher derivatives


@pytest.fixture
def arguments(rng, write):
    """A state and an observation."""
    factor = np.eye(3) + 0.3 * rng.normal(size=(3, 3))
    state = rng.normal(size=(2, 3)), Covariance(factor, np.asarray(0.9)) if write is SQRT_RLS else factor @ factor.T
    observation = Observation(rng.normal(size=3), rng.normal(size=2), np.asarray(0.7), np.asarray(1.2))
    return *state, observation


@pytest.fixture
def weights(rng):
    return rng.normal(size=(2, 3)), rng.normal(size=(3, 3))


def loss(write, weights, arguments):
    M, state = write.write(*arguments)
    return jnp.sum(weights[0] * jnp.sin(M)) + jnp.sum(weights[1] * jnp.cos(write.covariance(state)))


value_and_gradient = jax.jit(jax.value_and_grad(loss, argnums=2), static_argnums=0)


def admissible(write, direction):
    """The direction with a symmetric P. S may have any direction."""
    M, P, observation = direction
    return (M, P if write is SQRT_RLS else (P + P.T) / 2, observation)


def central_difference(write, weights, arguments, direction):
    above, below = (
        value_and_gradient(write, weights, jax.tree.map(lambda x, d, step=step: x + step * d, arguments, direction))[0]
        for step in (STEP, -STEP)
    )
    return (above - below) / (2 * STEP)


@each_write
def test_gradient_against_central_differences(write, weights, arguments):
    flat, unflatten = ravel_pytree(arguments)
    # Along every coordinate; those of P symmetrised.
    directions = [admissible(write, unflatten(one)) for one in np.eye(flat.size)]
    differences = [central_difference(write, weights, arguments, direction) for direction in directions]
    gradient = ravel_pytree(value_and_gradient(write, weights, arguments)[1])[0]
    slopes = [gradient @ ravel_pytree(direction)[0] for direction in directions]
    slopes, differences = (jax.tree.leaves(unflatten(np.stack(each))) for each in (slopes, differences))
    for actual, expected in zip(slopes, differences, strict=True):
        assert np.any(expected != 0)
        assert relative(actual, expected) < DIFFERENCES


@each_write
def test_jvp_against_differences_and_vjp(rng, write, weights, arguments):
    tangent = admissible(write, jax.tree.map(lambda part: rng.normal(size=part.shape), arguments))
    slope = jax.jit(lambda *point: jax.jvp(partial(loss, write, weights), (point[0],), (point[1],))[1])(
        arguments, tangent
    )
    gradient = ravel_pytree(value_and_gradient(write, weights, arguments)[1])[0]
    flat_tangent = ravel_pytree(tangent)[0]
    # The slope may cancel, so errors are relative to |gradient| |tangent|.
    scale = np.linalg.norm(gradient) * np.linalg.norm(flat_tangent)
    assert abs(slope - central_difference(write, weights, arguments, tangent)) < DIFFERENCES * scale
    assert abs(slope - gradient @ flat_tangent) < 1e-13 * scale


def test_read_gradient(rng):
    M, query, weight = rng.normal(size=(2, 3)), rng.normal(size=3), rng.normal(size=2)

    @jax.jit
    @jax.value_and_grad
    def f(point):
        return jnp.sum(weight * jnp.sin(rls_read(point[:6].reshape(2, 3), point[6:])))

    point = np.concatenate([M.ravel(), query])
    differences = [(f(point + step)[0] - f(point - step)[0]) / (2 * STEP) for step in STEP * np.eye(9)]
    assert relative(f(point)[1], differences) < DIFFERENCES


@each_regression
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])  # some roundings each
def test_slope_at_importance_0(rng, regression, dtype, tolerance):
    factor = rng.normal(size=(3, 3))
    M, P, key, value = rng.normal(size=(2, 3)), factor @ factor.T, rng.normal(size=3), rng.normal(size=2)
    covariance = P if regression is RLS else Covariance(factor, 1.0)
    state = jax.tree.map(lambda part: np.asarray(part, dtype), (M, covariance))
    forgetting = 0.7

    @jax.jit
    @jax.jacrev
    def slope(importance):
        M_after, state_after = regression.write(*state, Observation(key, value, forgetting, importance))
        return M_after, regression.covariance(state_after)

    M_slope, P_slope = slope(dtype(0))
    # By hand: the derivative of beta / (lambda + beta k'u) by beta at 0 is 1 / lambda.
    u = P @ key
    # Terms of P k and of M k may cancel, so errors are relative to the terms' absolute values.
    u_size = np.abs(factor) @ np.abs(factor).T @ np.abs(key)
    error_size = np.abs(value) + np.abs(M) @ np.abs(key)
    M_scale, P_scale = np.max(error_size) * np.max(u_size) / forgetting, np.max(u_size) ** 2 / forgetting**2
    assert relative(M_slope, np.outer(value - M @ key, u) / forgetting, M_scale) < tolerance
    assert relative(P_slope, -np.outer(u, u) / forgetting**2, P_scale) < tolerance
