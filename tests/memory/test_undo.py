"""A write undone gives the earlier state back, over a whole chain of writes."""

from functools import partial

import jax
import numpy as np
import pytest

from depth_problems import FORMS, cast, random_observations

DEPTH = 192


@partial(jax.jit, static_argnames=("form", "dtype"))
def there_and_back(form, dtype, observations):
    """The state before every write, as it was and as it comes back from the last state."""

    def write(state, observation):
        correction = form.correction(*state, observation)
        return form.apply(*state, correction, observation), (state, correction)

    def undo(state, seen):
        observation, correction = seen
        before = form.undo(*state, correction, observation)
        return before, before

    start = form.init(observations.value.shape[1], observations.key.shape[1], 1.0, dtype=dtype)
    last, (states, corrections) = jax.lax.scan(write, start, observations)
    return states, jax.lax.scan(undo, last, (observations, corrections), reverse=True)[1]


@pytest.mark.parametrize("growth", [1.0, 1e3])
@pytest.mark.parametrize("forgetting", [0.8, 0.9, 0.95, (0.85, 1.0), 1.0], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "memory_tolerance", "covariance_tolerance"),
    [
        ("rls", np.float32, 1e-6, 1e-6),  # several times the 1e-7 of one rounding: the errors do not add up
        # Scaling S by the rounded 1 / sqrt(lambda) and back by the rounded sqrt(lambda) leaves one rounding a write.
        ("sqrt", np.float32, 1e-6, DEPTH * 1.2e-7),
        ("rls", np.float64, 1e-14, 1e-14),  # the same counts of roundings at 2e-16
        ("sqrt", np.float64, 1e-14, DEPTH * 2.2e-16),
    ],
)
@pytest.mark.usefixtures("x64")
def test_every_earlier_state_comes_back(rng, name, dtype, memory_tolerance, covariance_tolerance, forgetting, growth):
    observations = random_observations(rng, DEPTH, 4, 4, forgetting=forgetting)
    value = observations.value * np.geomspace(1, growth, DEPTH)[:, None]
    importance = observations.importance * (rng.random(DEPTH) < 0.9)
    observations = cast(observations._replace(value=value, importance=importance), dtype)
    (M, P), (M_back, P_back) = there_and_back(FORMS[name], dtype, observations)
    assert np.max(np.abs(M_back - M)) < memory_tolerance * np.max(np.abs(M))
    # P shrinks over depth, so each is measured by itself.
    assert np.all(np.max(np.abs(P_back - P), axis=(1, 2)) < covariance_tolerance * np.max(np.abs(P), axis=(1, 2)))


@pytest.mark.usefixtures("x64")
def test_the_first_state_is_the_start(rng):
    observations = random_observations(rng, DEPTH, 4, 4, forgetting=0.9)
    _, (M, P) = there_and_back(FORMS["rls"], np.float32, observations)
    # As above: some roundings of values of order 1.
    np.testing.assert_allclose(M[0], np.zeros((4, 4)), rtol=0, atol=1e-6 * np.max(np.abs(M)))
    np.testing.assert_allclose(P[0], np.eye(4), rtol=0, atol=1e-6)
