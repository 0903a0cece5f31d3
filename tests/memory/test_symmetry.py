"""P stays symmetric to the bit going forward, and its cotangent to a rounding going backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import each_state, random_observations, relative
from ldm_jax import Observation, init_state, rls_apply, rls_correction, rls_undo, rls_write

GROUPS = 5


def python_loop(write, state, observations):
    states = []
    for observation in zip(*observations, strict=True):
        state = write(*state, Observation(*observation))
        states.append(state)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *states)


def in_groups(write, state, observations):
    """The same observations in every group, but for their importance: 0, once, twice, ..."""
    times = jnp.arange(GROUPS, dtype=jnp.float32)
    return jax.vmap(
        lambda times: each_state(
            write, state, observations._replace(importance=times * jnp.asarray(observations.importance))
        )
    )(times)


def assert_symmetric(matrices):
    assert np.any(matrices[..., 0, 1] != 0)
    np.testing.assert_array_equal(matrices, np.swapaxes(matrices, -1, -2))


@pytest.mark.parametrize(
    ("every_state", "depth"),
    [(python_loop, 12), (jax.jit(each_state, static_argnums=0), 192), (jax.jit(in_groups, static_argnums=0), 192)],
    ids=["eager", "jit", "vmap"],
)
def test_inverse_covariance(rng, every_state, depth):
    observations = random_observations(rng, depth, 3, 4, forgetting=(0.8, 1.0), shared=0.5)
    assert_symmetric(every_state(rls_write, init_state(3, 4, 10.0), observations)[1])


@pytest.fixture
def state(rng):
    factor = rng.normal(size=(4, 4)).astype(np.float32)
    return rng.normal(size=(3, 4)).astype(np.float32), factor @ factor.T


@pytest.fixture
def weights(rng):
    return rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32)


def undone(memory, inverse_covariance, observation):
    correction = jax.lax.stop_gradient(rls_correction(memory, inverse_covariance, observation))
    return rls_undo(memory, inverse_covariance, correction, observation)


def applied(memory, inverse_covariance, observation):
    correction = jax.lax.stop_gradient(rls_correction(memory, inverse_covariance, observation))
    return rls_apply(memory, inverse_covariance, correction, observation)


def assert_almost_symmetric(matrix):
    assert np.any(matrix[..., 0, 1] != 0)
    # The two halves of each contribution are added in another order: a few roundings of 6e-8 of the largest.
    assert relative(matrix, matrix.T) < 5e-7


@pytest.mark.parametrize("step", [rls_write, undone, applied])
def test_cotangent(rng, state, weights, step):
    observation = Observation(*(part[0] for part in random_observations(rng, 1, 3, 4)))

    @jax.jit
    @jax.grad
    def gradient(inverse_covariance, memory):
        M, P = step(memory, inverse_covariance, observation)
        return jnp.sum(weights[0] * M) + jnp.sum(weights[1] * jnp.tanh(P))  # lopsided in P

    assert_almost_symmetric(gradient(state[1], state[0]))


def test_cotangent_through_many_writes(rng, state, weights):
    observations = random_observations(rng, 96, 3, 4, forgetting=0.8)

    @jax.jit
    @jax.grad
    def gradient(inverse_covariance, memory):
        Ms, Ps = each_state(rls_write, (memory, inverse_covariance), observations)
        return jnp.sum(weights[0] * jnp.tanh(Ms)) + jnp.sum(weights[1] * jnp.tanh(Ps))

    assert_almost_symmetric(gradient(state[1], state[0]))
