"""After any number of writes the state is the solution of the depth regression."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depth_problems import (
    REGRESSIONS,
    RLS,
    cast,
    deep_states,
    each_regression,
    prefix_solutions,
    random_observations,
    relative,
)
from ldm_jax import Covariance, Observation, depth_memory_loop, rls_correction, rls_read, solve_depth_regression

# N, V, K: one observation; fewer observations than key dimensions; more. Each shape is compiled once.
SHAPES = [(1, 2, 4), (3, 2, 8), (12, 3, 4)]


@jax.jit
def recursive_and_batch(observations, alpha):
    """`(M, P)` by the writes of each regression, and by the batch solution."""
    shape = observations.value.shape[1], observations.key.shape[1]
    states = []
    for regression in REGRESSIONS.values():
        init = partial(regression.init, dtype=jnp.float64)
        M, state = depth_memory_loop(observations, *shape, alpha, write=regression.write, init=init)
        states.append((M, regression.covariance(state)))
    return states, solve_depth_regression(observations, alpha)


@st.composite
def drawn_observations(draw, depth, value_dim, key_dim):
    """Random numbers from a drawn seed. The places of values that are exactly 0, 1 or repeated are drawn, too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def places():
        return np.array(draw(st.lists(st.sampled_from([False, False, True]), min_size=depth, max_size=depth)))

    key = rng.uniform(-1, 1, size=(depth, key_dim)) * draw(st.sampled_from([1, 1, 1e-3, 1e-8]))
    key[places()] = key[0]
    key[places()] = 0
    return Observation(
        key=key,
        value=rng.uniform(-1, 1, size=(depth, value_dim)) * draw(st.sampled_from([1e-3, 1, 1e3])),
        forgetting=np.where(places(), 1, rng.uniform(0.8, 1, size=depth)),
        importance=np.where(places(), 0, rng.uniform(0, 2, size=depth)),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_the_state_solves_the_regression(shape, data):
    observations = data.draw(drawn_observations(*shape))
    alpha = data.draw(st.floats(0.1, 10))
    with jax.enable_x64(True):
        recursive, (M, P) = jax.tree.map(np.asarray, recursive_and_batch(observations, alpha))
    # The covariance's condition number is at most 1 + alpha sum_i beta_i |k_i|^2 / prod_{j<=i} lambda_j: below 6e3 for
    # these ranges, so that roundings of 1e-16 become 1e-12. The rest of 1e-10 is for their sum over the writes.
    # M may cancel from the size of alpha beta v k', so its error is relative to that.
    size = alpha * np.max(np.abs(observations.value)) * np.max(np.abs(observations.key))
    for memory, inverse_covariance in recursive:
        assert np.max(np.abs(memory - M)) <= 1e-10 * size
        assert relative(inverse_covariance, P) < 1e-10


@each_regression
@pytest.mark.usefixtures("x64")
def test_every_prefix_is_solved(rng, regression):
    observations = cast(random_observations(rng, 192, 4, 4, forgetting=(0.8, 1.0)), np.float64)
    M, state = deep_states(regression.init, regression.write, jnp.float64, observations, 2.0)
    expected_M, expected_P = prefix_solutions(observations, 2.0)
    # Unit keys in 4 dimensions: a condition number below 1e3.
    assert relative(M, expected_M) < 1e-12
    assert relative(regression.covariance(state), expected_P) < 1e-12


def test_with_importance_0_a_write_only_forgets(rng):
    M, P = rng.normal(size=(3, 4)).astype(np.float32), np.diag([1.0, 2.0, 3.0, 4.0]).astype(np.float32)
    observation = Observation(rng.normal(size=4), rng.normal(size=3), 0.5, 0.0)
    after_M, after_P = RLS.write(M, P, observation)
    # Exactly: nothing is added, and halves are exact.
    np.testing.assert_array_equal(after_M, M)
    np.testing.assert_array_equal(after_P, 2 * P)


@pytest.mark.usefixtures("x64")
@each_regression
def test_correction_against_its_definition(rng, regression):
    M, factor = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))
    P = factor @ factor.T
    key, value, forgetting, importance = rng.normal(size=4), rng.normal(size=3), 0.7, 1.3
    observation = Observation(key, value, forgetting, importance)
    if regression is RLS:
        error, projected, innovation = regression.correction(M, P, observation)
    else:  # u is discount * P k, and g is beta / (discount * s)
        discount = 0.4
        state = Covariance(np.sqrt(discount) * factor, np.float64(discount))
        error, gain = regression.correction(M, state, observation)
        projected, innovation = gain.direction / discount, importance / (discount * gain.size)
    # A few roundings of sums of four terms, relative to the sum of the terms' absolute values.
    assert relative(error, value - M @ key, np.max(np.abs(value) + np.abs(M) @ np.abs(key))) < 1e-14
    assert relative(projected, P @ key, np.max(np.abs(factor) @ np.abs(factor).T @ np.abs(key))) < 1e-14
    np.testing.assert_allclose(innovation, forgetting + importance * key @ P @ key, rtol=1e-13)


@pytest.mark.usefixtures("x64")
def test_correction_from_the_state_after_the_write(rng):
    observations = cast(random_observations(rng, 192, 4, 4), np.float64)
    M, P = deep_states(RLS.init, RLS.write, jnp.float64, observations, 1.0)
    last = Observation(*(part[-1] for part in observations))
    error, projected, innovation = rls_correction(M[-2], P[-2], last)
    # P_after k = u / s and v - M_after k = e lambda / s: the gain form of the same write, up to rounding.
    assert relative(P[-1] @ last.key, projected / innovation) < 1e-13
    remaining_error = error * last.forgetting / innovation
    assert relative(last.value - M[-1] @ last.key, remaining_error, np.max(np.abs(M))) < 1e-14


@pytest.mark.usefixtures("x64")
def test_read(rng):
    M, query = rng.normal(size=(3, 4)), rng.normal(size=4)
    # Four products summed in another order.
    assert relative(rls_read(M, query), M @ query, np.max(np.abs(M) @ np.abs(query))) < 1e-15
