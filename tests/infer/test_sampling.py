"""Filters of the logits, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.infer import Sampling
from ldm_jax.infer.sampling import draw, filtered_logits


def allowed(logits, seen=None, **options):
    """The filtered logits of one sequence, and the set of allowed tokens."""
    seen = np.zeros(len(logits), bool) if seen is None else seen
    sampling = Sampling(**{"temperature": 1.0} | options)
    found = np.asarray(filtered_logits(sampling.values, jnp.asarray([logits], jnp.float32), jnp.asarray([seen])))[0]
    return found, set(np.flatnonzero(np.isfinite(found)).tolist())


def test_defaults_allow_every_token():
    found, tokens = allowed([1.0, -2.0, 0.5])
    np.testing.assert_array_equal(found, [1.0, -2.0, 0.5])
    assert tokens == {0, 1, 2}


def test_top_k(rng):
    logits = rng.normal(size=50)
    for k in (1, 7, 50, 60):
        assert allowed(logits, top_k=k)[1] == set(np.argsort(-logits)[:k].tolist())


def test_top_p(rng):
    logits = rng.normal(size=50)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-logits)
    for p in (1e-40, 1e-6, 0.3, 0.9):
        fewest = next(n for n in range(1, 51) if probabilities[order[:n]].sum() >= p)
        assert allowed(logits, top_p=p)[1] == set(order[:fewest].tolist())
    shares = probabilities[order[:7]] / probabilities[order[:7]].sum()
    fewest = next(n for n in range(1, 8) if shares[:n].sum() >= 0.9)
    assert allowed(logits, top_k=7, top_p=0.9)[1] == set(order[:fewest].tolist())


def test_min_p(rng):
    logits = rng.normal(size=50)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert allowed(logits, min_p=0.2)[1] == set(np.flatnonzero(probabilities >= 0.2 * probabilities.max()).tolist())
    assert allowed(logits, min_p=1.0)[1] == {int(np.argmax(logits))}


def test_repetition_penalty_and_temperature():
    found, _ = allowed([2.0, -1.0, 3.0], seen=[True, True, False], repetition_penalty=2.0, temperature=0.5)
    np.testing.assert_allclose(found, [2.0, -4.0, 6.0])


def test_draws_have_the_probabilities():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]] * 4000))
    keys = jax.random.split(jax.random.key(0), 4000)
    seen, every = jnp.zeros(logits.shape, bool), jnp.ones((1, 4), bool)
    tokens = draw(Sampling(temperature=1.0, top_p=0.9).values, logits, seen, every, keys)
    shares = np.bincount(tokens, minlength=4) / 4000
    # Of the .95 that are allowed; a share's standard deviation is at most .008.
    np.testing.assert_allclose(shares, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.03)
    assert draw(Sampling(temperature=0.0).values, logits, seen, every, keys).tolist() == [0] * 4000
    # A token that may not be drawn takes no place in top_k either.
    allowed = jnp.asarray([[False, True, False, True]])
    for sampling, expected in ((Sampling(temperature=50.0, top_k=2), {1, 3}), (Sampling(temperature=0.0), {1})):
        assert set(draw(sampling.values, logits, seen, allowed, keys).tolist()) == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -1.0}, r"temperature is -1\.0"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"repetition_penalty": 1e39}, r"repetition_penalty is 1e\+39"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"min_p": 1.5}, r"min_p is 1\.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0"),
    ],
)
def test_options_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**options)
