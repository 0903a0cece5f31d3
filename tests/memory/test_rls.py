"""After any number of writes the state is the solution of the depth regression, whatever the observations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depth_problems import FORMS, cast, deep_states, prefix_solutions, random_observations, relative
from ldm_jax import Observation, rls_correction, rls_read, solve_depth_regression

# One observation; fewer observations than key dimensions; more.
SHAPES = [(1, 2, 4), (3, 2, 8), (12, 3, 4)]  # N, V, K: few, because each compiles once


@jax.jit
def three_ways(observations, alpha):
    shape = observations.value.shape[1], observations.key.shape[1]
    states = []
    for form in FORMS.values():
        state = form.init(*shape, alpha, dtype=jnp.float64)
        M, state = jax.lax.scan(lambda s, o, write=form.write: (write(*s, o), None), state, observations)[0]
        states.append((M, form.covariance(state)))
    return *states, solve_depth_regression(observations, alpha)


@st.composite
def some_observations(draw, depth, value_dim, key_dim):
    """Random numbers from a drawn seed; where they are exactly 0, 1 or repeated is drawn, too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def some():
        return np.array(draw(st.lists(st.sampled_from([False, False, True]), min_size=depth, max_size=depth)))

    key = rng.uniform(-1, 1, size=(depth, key_dim)) * draw(st.sampled_from([1, 1, 1e-3, 1e-8]))
    key[some()] = key[0]
    key[some()] = 0
    return Observation(
        key=key,
        value=rng.uniform(-1, 1, size=(depth, value_dim)) * draw(st.sampled_from([1e-3, 1, 1e3])),
        forgetting=np.where(some(), 1, rng.uniform(0.8, 1, size=depth)),
        importance=np.where(some(), 0, rng.uniform(0, 2, size=depth)),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_the_state_solves_the_regression(shape, data):
    observations = data.draw(some_observations(*shape))
    alpha = data.draw(st.floats(0.1, 10))
    with jax.enable_x64(True):
        *recursive, (M, P) = jax.tree.map(np.asarray, three_ways(observations, alpha))
    # The covariance's condition number is at most 1 + alpha sum_i beta_i |k_i|^2 / prod_{j<=i} lambda_j: below 6e3 for
    # these ranges, so that rounding at 1e-16 costs 1e-12. The rest of 1e-10 is for adding up over the writes.
    # M may cancel down from the size of alpha beta v k', so the error is measured against that.
    size = alpha * np.max(np.abs(observations.value)) * np.max(np.abs(observations.key))
    for memory, inverse_covariance in recursive:
        assert np.max(np.abs(memory - M)) <= 1e-10 * size
        assert relative(inverse_covariance, P) < 1e-10


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("x64")
def test_every_prefix_is_solved(rng, name):
    form = FORMS[name]
    observations = cast(random_observations(rng, 192, 4, 4, forgetting=(0.8, 1.0)), np.float64)
    M, state = deep_states(form.init, form.write, jnp.float64, observations, 2.0)
    expected_M, expected_P = prefix_solutions(observations, 2.0)
    # Unit keys in 4 dimensions: a condition number below 1e3.
    assert relative(M, expected_M) < 1e-12
    assert relative(form.covariance(state), expected_P) < 1e-12


def test_an_unimportant_observation_only_forgets(rng):
    M, P = rng.normal(size=(3, 4)).astype(np.float32), np.diag([1.0, 2.0, 3.0, 4.0]).astype(np.float32)
    observation = Observation(rng.normal(size=4), rng.normal(size=3), 0.5, 0.0)
    after_M, after_P = FORMS["rls"].write(M, P, observation)
    # To the bit: nothing is added, and halves are exact.
    np.testing.assert_array_equal(after_M, M)
    np.testing.assert_array_equal(after_P, 2 * P)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FORMS)
def test_correction_against_its_definition(rng, name):
    form = FORMS[name]
    M, factor = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))
    P = factor @ factor.T
    key, value, forgetting, importance = rng.normal(size=4), rng.normal(size=3), 0.7, 1.3
    observation = Observation(key, value, forgetting, importance)
    error, projected, innovation = form.correction(M, P if name == "rls" else factor, observation)
    # A few roundings of numbers of order 10.
    np.testing.assert_allclose(error, value - M @ key, rtol=0, atol=1e-13)
    np.testing.assert_allclose(projected, P @ key, rtol=0, atol=1e-13)
    np.testing.assert_allclose(innovation, forgetting + importance * key @ P @ key, rtol=1e-13)


@pytest.mark.usefixtures("x64")
def test_correction_from_the_later_state(rng):
    observations = cast(random_observations(rng, 192, 4, 4), np.float64)
    M, P = deep_states(FORMS["rls"].init, FORMS["rls"].write, jnp.float64, observations, 1.0)
    last = Observation(*(part[-1] for part in observations))
    error, projected, innovation = rls_correction(M[-2], P[-2], last)
    # P_after k = u / s and v - M_after k = e lambda / s: the gain form of the same write, up to rounding.
    assert relative(P[-1] @ last.key, projected / innovation) < 1e-13
    np.testing.assert_allclose(
        last.value - M[-1] @ last.key, error * last.forgetting / innovation, rtol=0, atol=1e-14 * np.max(np.abs(M))
    )


@pytest.mark.usefixtures("x64")
def test_read(rng):
    M, query = rng.normal(size=(3, 4)), rng.normal(size=4)
    # Four products summed in another order.
    np.testing.assert_allclose(rls_read(M, query), M @ query, rtol=0, atol=1e-14)
