"""Undoing a sequence of writes restores every earlier state."""

from functools import partial

import jax
import numpy as np
import pytest

from depth_problems import REGRESSIONS, RLS, cast, random_observations, relative

DEPTH = 192


@partial(jax.jit, static_argnames=("regression", "dtype"))
def states_and_restored(regression, dtype, observations):
    """The state before every write, and the same states restored from the last one."""

    def write(state, observation):
        correction = regression.correction(*state, observation)
        return regression.apply(*state, correction, observation), (state, correction)

    def undo(state, inputs):
        observation, correction = inputs
        before = regression.undo(*state, correction, observation)
        return before, before

    start = regression.init(observations.value.shape[1], observations.key.shape[1], 1.0, dtype=dtype)
    last, (states, corrections) = jax.lax.scan(write, start, observations)
    return states, jax.lax.scan(undo, last, (observations, corrections), reverse=True)[1]


@pytest.mark.parametrize("growth", [1.0, 1e3])
@pytest.mark.parametrize("forgetting", [0.8, 0.9, 0.95, (0.85, 1.0), 1.0], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "memory_tolerance", "covariance_tolerance"),
    [
        ("rls", np.float32, 1e-6, 1e-6),  # several roundings of 1e-7: errors do not add up over depth
        ("sqrt_rls", np.float32, 1e-6, 1e-6),
        ("rls", np.float64, 1e-14, 1e-14),  # the same numbers of roundings of 2e-16
        ("sqrt_rls", np.float64, 1e-14, 1e-14),
    ],
)
@pytest.mark.usefixtures("x64")
def test_every_state_is_restored(rng, name, dtype, memory_tolerance, covariance_tolerance, forgetting, growth):
    observations = random_observations(rng, DEPTH, 4, 4, forgetting=forgetting)
    value = observations.value * np.geomspace(1, growth, DEPTH)[:, None]
    importance = observations.importance * (rng.random(DEPTH) < 0.9)
    observations = cast(observations._replace(value=value, importance=importance), dtype)
    regression = REGRESSIONS[name]
    (M, state), (restored_M, restored) = states_and_restored(regression, dtype, observations)
    P, restored_P = (regression.covariance(jax.tree.map(np.float64, part)) for part in (state, restored))
    assert relative(restored_M, M) < memory_tolerance
    # P shrinks over depth, so the error of each is relative to itself.
    errors, sizes = np.max(np.abs(restored_P - P), axis=(1, 2)), np.max(np.abs(P), axis=(1, 2))
    assert np.all(errors < covariance_tolerance * sizes)


@pytest.mark.usefixtures("x64")
def test_the_initial_state_is_restored(rng):
    observations = random_observations(rng, DEPTH, 4, 4, forgetting=0.9)
    _, (M, P) = states_and_restored(RLS, np.float32, observations)
    # As above: several roundings of the largest M, and of P = I.
    assert relative(M[0], np.zeros((4, 4)), np.max(np.abs(M))) < 1e-6
    assert relative(P[0], np.eye(4)) < 1e-6
