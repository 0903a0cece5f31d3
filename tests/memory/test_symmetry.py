"""P stays symmetric to the bit in the forward pass, and its cotangent up to a rounding in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import every_state, random_observations, relative
from ldm_jax import Observation, init_state, rls_apply, rls_correction, rls_undo, rls_write

GROUPS = 5


def every_state_eager(write, state, observations):
    states = []
    for observation in zip(*observations, strict=True):
        state = write(*state, Observation(*observation))
        states.append(state)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *states)


def every_state_of_groups(write, state, observations):
    """The groups have the same observations, with importance times 0, 1, 2, ..."""
    times = jnp.arange(GROUPS, dtype=jnp.float32)
    return jax.vmap(
        lambda times: every_state(
            write, state, observations._replace(importance=times * jnp.asarray(observations.importance))
        )
    )(times)


def assert_symmetric(matrices):
    assert np.any(matrices[..., 0, 1] != 0)
    np.testing.assert_array_equal(matrices, np.swapaxes(matrices, -1, -2))


@pytest.mark.parametrize(
    ("run", "depth"),
    [
        (every_state_eager, 12),
        (jax.jit(every_state, static_argnums=0), 192),
        (jax.jit(every_state_of_groups, static_argnums=0), 192),
    ],
    ids=["eager", "jit", "vmap"],
)
def test_inverse_covariance(rng, run, depth):
    observations = random_observations(rng, depth, 3, 4, forgetting=(0.8, 1.0), shared=0.5)
    assert_symmetric(run(rls_write, init_state(3, 4, 10.0), observations)[1])


@pytest.fixture
def state(rng):
    factor = rng.normal(size=(4, 4)).astype(np.float32)
    return rng.normal(size=(3, 4)).astype(np.float32), factor @ factor.T


@pytest.fixture
def weights(rng):
    return rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32)


def undo(memory, inverse_covariance, observation):
    correction = jax.lax.stop_gradient(rls_correction(memory, inverse_covariance, observation))
    return rls_undo(memory, inverse_covariance, correction, observation)


def apply(memory, inverse_covariance, observation):
    correction = jax.lax.stop_gradient(rls_correction(memory, inverse_covariance, observation))
    return rls_apply(memory, inverse_covariance, correction, observation)


def assert_almost_symmetric(matrix):
    assert np.any(matrix[..., 0, 1] != 0)
    # The two halves of each term are added in another order: a few roundings of 6e-8 of the largest entry.
    assert relative(matrix, matrix.T) < 5e-7


@pytest.mark.parametrize("step", [rls_write, undo, apply])
def test_cotangent(rng, state, weights, step):
    observation = Observation(*(part[0] for part in random_observations(rng, 1, 3, 4)))

    @jax.jit
    @jax.grad
    def gradient(inverse_covariance, memory):
        M, P = step(memory, inverse_covariance, observation)
        return jnp.sum(weights[0] * M) + jnp.sum(weights[1] * jnp.tanh(P))  # the weights of P are not symmetric

    assert_almost_symmetric(gradient(state[1], state[0]))


def test_cotangent_through_many_writes(rng, state, weights):
    observations = random_observations(rng, 96, 3, 4, forgetting=0.8)

    @jax.jit
    @jax.grad
    def gradient(inverse_covariance, memory):
        Ms, Ps = every_state(rls_write, (memory, inverse_covariance), observations)
        return jnp.sum(weights[0] * jnp.tanh(Ms)) + jnp.sum(weights[1] * jnp.tanh(Ps))

    assert_almost_symmetric(gradient(state[1], state[0]))
