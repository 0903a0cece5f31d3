"""Writes preserve the type of the state, and cast observations to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import ADDITIVE, DELTA, RLS, WRITES, each_regression, each_write
from ldm_jax import Observation, depth_memory_loop, init_state, rls_read

KEY, VALUE = [0.0, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0]
OBSERVATIONS = {
    "numpy float64": Observation(np.array(KEY), np.array(VALUE), np.float64(0.5), np.float64(2)),
    "numpy float32": Observation(np.float32(KEY), np.float32(VALUE), np.float32(0.5), np.float32(2)),
    "numpy float16": Observation(np.float16(KEY), np.float16(VALUE), np.float16(0.5), np.float16(2)),
    "numpy int": Observation(np.array(KEY, int), np.array(VALUE, int), 1, np.int32(2)),
    "python numbers": Observation(KEY, VALUE, 0.5, 2),
    "jax float16": Observation(*(jnp.asarray(part, jnp.float16) for part in (KEY, VALUE, 0.5, 2))),
    "jax bfloat16": Observation(*(jnp.asarray(part, jnp.bfloat16) for part in (KEY, VALUE, 0.5, 2))),
    "jax int": Observation(*(jnp.asarray(part, jnp.int32) for part in (KEY, VALUE, 1, 2))),
    "mixed": Observation(np.float16(KEY), jnp.asarray(VALUE, jnp.bfloat16), np.float64(0.5), 2),
}
each_observation = pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rls", "float32"),
        ("rls", "float64"),
        ("sqrt_rls", "float32"),
        ("sqrt_rls", "float64"),
        ("additive", "float32"),
        ("delta", "float32"),
    ],
)
@each_observation
@pytest.mark.usefixtures("x64")
def test_write_preserves_the_type_of_the_state(name, observation, dtype):
    write = WRITES[name]
    before = write.init(3, 4, 2.0, dtype=jnp.dtype(dtype))
    after = write.write(*before, observation)
    assert {part.dtype for part in jax.tree.leaves((before, after))} == {jnp.dtype(dtype)}
    M_after, _ = after
    # By hand, with importance 2 and k'k = 5: M = v k' times alpha beta / (lambda + alpha beta k'k), or times beta.
    times = 2 if write in (ADDITIVE, DELTA) else 4 / (float(observation.forgetting) + 20)
    # The observation is exact in every type, so the only roundings are those of the state.
    expected = times * np.outer(VALUE, KEY)
    tolerance = 8 * float(jnp.finfo(dtype).eps) * np.max(expected)
    np.testing.assert_allclose(np.asarray(M_after, np.float64), expected, rtol=0, atol=tolerance)


@each_write
@each_observation
def test_default_state_is_float32_without_64_bit_mode(write, observation):
    state = write.write(*write.init(3, 4, 2.0), observation)
    assert {part.dtype for part in jax.tree.leaves(state)} == {jnp.dtype("float32")}


@pytest.mark.usefixtures("x64")
def test_float64_observations_are_rounded_to_a_float32_state(rng):
    key, value = rng.normal(size=4), rng.normal(size=3)
    float64 = Observation(jnp.asarray(key), jnp.asarray(value), jnp.asarray(0.9), jnp.asarray(0.3))
    assert float64.key.dtype == jnp.float64
    float32 = Observation(*(np.asarray(part, np.float32) for part in float64))
    state = RLS.init(3, 4, 2.0)
    for actual, expected in zip(RLS.write(*state, float64), RLS.write(*state, float32), strict=True):
        np.testing.assert_array_equal(actual, expected)


@each_regression
@each_observation
@pytest.mark.usefixtures("x64")
def test_correction_and_undo_preserve_the_type_of_the_state(regression, observation):
    state = regression.init(3, 4, 2.0)
    correction = regression.correction(*state, observation)
    after = regression.apply(*state, correction, observation)
    before = regression.undo(*after, correction, observation)
    assert {part.dtype for part in jax.tree.leaves((correction, after, before))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", [name for name in OBSERVATIONS if name not in ("python numbers", "mixed")])
@pytest.mark.usefixtures("x64")
def test_loop_preserves_the_type_of_the_state(name):
    observations = Observation(*(np.asarray(part)[None] for part in OBSERVATIONS[name]))
    M, P = jax.eval_shape(lambda alpha: depth_memory_loop(observations, 3, 4, alpha), 1.0)
    assert M.dtype == P.dtype == jnp.float32


@pytest.mark.parametrize("query", [np.array(KEY), np.float16(KEY), jnp.asarray(KEY, jnp.bfloat16)])
@pytest.mark.usefixtures("x64")
def test_read_has_the_type_of_the_memory(query):
    M, _ = init_state(3, 4, 1.0)
    assert rls_read(M, query).dtype == jnp.float32


@pytest.mark.parametrize("alpha", [2, 2.0, np.float64(2), np.float32(2), np.array(2), jnp.float32(2)], ids=repr)
@each_regression
@pytest.mark.usefixtures("x64")
def test_alpha_is_cast_to_the_type_of_the_state(regression, alpha):
    M, state = regression.init(3, 4, alpha)
    assert {part.dtype for part in jax.tree.leaves((M, state))} == {jnp.dtype("float32")}
    # The square of a square root: one rounding each.
    np.testing.assert_allclose(regression.covariance(state), 2 * np.eye(4), rtol=3e-7)


def test_numpy_state():
    M, P = (np.asarray(part) for part in init_state(3, 4, 2.0))
    assert RLS.write(M, P, OBSERVATIONS["numpy float64"])[0].dtype == jnp.float32
