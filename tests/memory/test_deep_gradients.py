"""float32 gradients with a read at every depth, against float64 gradients of the batch solution of every prefix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import (
    RLS,
    cast,
    deep_states,
    each_regression,
    prefix_solutions,
    random_observations,
    relative,
)
from ldm_jax import Observation, rls_read

DEPTH, VALUE, KEY, ALPHA = 96, 3, 4, 1.0
pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-5  # a hundred float32 roundings; 1e-6 was measured


def unsymmetrised_write(memory, inverse_covariance, observation):
    """`rls_write` without `P <- (P + P') / 2`."""
    key, value, forgetting, importance = observation
    u = jnp.sum(inverse_covariance * key, axis=-1)
    s = forgetting + importance * jnp.sum(key * u)
    e = value - jnp.sum(memory * key, axis=-1)
    gain = importance / s
    return memory + gain * jnp.outer(e, u), (inverse_covariance - gain * jnp.outer(u, u)) / forgetting


def score(memories, queries, weights):
    return jnp.sum(weights * jnp.tanh(jax.vmap(rls_read)(memories, queries)))


@partial(jax.jit, static_argnames=("init", "write"))
@partial(jax.grad, argnums=2)
def float32_gradient(init, write, observations, queries, weights):
    return score(deep_states(init, write, jnp.float32, observations, ALPHA)[0], queries, weights)


@jax.jit
@jax.grad
def float64_gradient(observations, queries, weights):
    return score(prefix_solutions(observations, ALPHA)[0], queries, weights)


def errors(rng, init, write, observations) -> dict[str, float]:
    """For the gradient of each part of the observations: the norm of the error over the norm."""
    queries, weights = (rng.normal(size=(DEPTH, width)).astype(np.float32) for width in (KEY, VALUE))
    actual = float32_gradient(init, write, observations, queries, weights)
    expected = float64_gradient(
        *(cast(observations, np.float64), queries.astype(np.float64), weights.astype(np.float64))
    )
    return {
        name: np.linalg.norm(got - want) / (np.linalg.norm(want) or 1)
        for name, got, want in zip(Observation._fields, cast(actual, np.float64), expected, strict=True)
    }


@each_regression
@pytest.mark.parametrize("forgetting", [0.8, 0.9, 0.95])
def test_gradient_of_reads_at_every_depth(rng, regression, forgetting, record_property):
    observations = random_observations(rng, DEPTH, VALUE, KEY, forgetting=forgetting)
    found = errors(rng, regression.init, regression.write, observations)
    record_property("errors", str(found))
    # An error that grew like lambda^-l would be far larger.
    assert max(found.values()) < TOLERANCE, found


@each_regression
@pytest.mark.parametrize("blank", [slice(None), slice(3, None, 2)], ids=["all", "half"])
def test_gradient_where_importance_and_keys_are_zero(rng, regression, blank):
    observations = random_observations(rng, DEPTH, VALUE, KEY, forgetting=0.95)
    observations.importance[blank] = 0
    observations.key[5:9] = 0
    found = errors(rng, regression.init, regression.write, observations)
    # `all(... < ...)` fails for NaN, which a square root of importance would give.
    assert all(error < TOLERANCE for error in found.values()), found


def test_gradient_is_wrong_without_symmetrisation(rng):
    observations = random_observations(rng, DEPTH, VALUE, KEY, forgetting=0.8)
    found = errors(rng, RLS.init, unsymmetrised_write, observations)
    # An antisymmetric part of P's cotangent grows like .8^-96 = 2e9, from roundings of 6e-8.
    assert found["key"] > 1e-3, found
    # The gradient of the values does not depend on P's cotangent.
    assert found["value"] < TOLERANCE, found


def test_symmetrisation_does_not_change_the_states(rng):
    observations = random_observations(rng, DEPTH, VALUE, KEY, forgetting=0.8)
    symmetrised = deep_states(RLS.init, RLS.write, jnp.float32, observations, ALPHA)
    unsymmetrised = deep_states(RLS.init, unsymmetrised_write, jnp.float32, observations, ALPHA)
    # The same arithmetic, compiled with other fused multiply-adds.
    for actual, expected in zip(symmetrised, unsymmetrised, strict=True):
        assert relative(actual, expected) < TOLERANCE
