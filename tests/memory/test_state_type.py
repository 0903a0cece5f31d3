"""The state keeps the type that it was given; observations are cast to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import FORMS
from ldm_jax import Observation, additive_write, delta_write, depth_memory_loop, init_state, rls_read

RLS, SQRT = FORMS["rls"], FORMS["sqrt"]
each_write = pytest.mark.parametrize(
    ("write", "init"),
    [(RLS.write, RLS.init), (SQRT.write, SQRT.init), (additive_write, RLS.init), (delta_write, RLS.init)],
)
KEY, VALUE = [0.0, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0]
GIVEN = {
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
each_given = pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)


@pytest.mark.parametrize(
    ("write", "init", "dtype"),
    [
        (RLS.write, RLS.init, "float32"),
        (RLS.write, RLS.init, "float64"),
        (SQRT.write, SQRT.init, "float32"),
        (SQRT.write, SQRT.init, "float64"),
        (additive_write, RLS.init, "float32"),
        (delta_write, RLS.init, "float32"),
    ],
)
@each_given
@pytest.mark.usefixtures("x64")
def test_write_keeps_the_state_type(write, init, given, dtype):
    M, P = init(3, 4, 2.0, dtype=jnp.dtype(dtype))
    assert M.dtype == P.dtype == dtype
    M_after, P_after = write(M, P, given)
    assert M_after.dtype == P_after.dtype == dtype
    # By hand, with importance 2 and k'k = 5: M = v k' times alpha beta / (lambda + alpha beta k'k), or times beta.
    times = 2 if write in (additive_write, delta_write) else 4 / (float(given.forgetting) + 20)
    # What is given is exact in every type, so only the state's own roundings of numbers up to 12 are left.
    expected, tolerance = times * np.outer(VALUE, KEY), 32 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(M_after, np.float64), expected, rtol=0, atol=tolerance)


@each_write
@each_given
def test_default_state_is_float32_without_64_bit_mode(write, init, given):
    M, P = write(*init(3, 4, 2.0), given)
    assert M.dtype == P.dtype == jnp.float32


@pytest.mark.usefixtures("x64")
def test_float64_observations_are_rounded_to_a_float32_state(rng):
    key, value = rng.normal(size=4), rng.normal(size=3)
    wide = Observation(jnp.asarray(key), jnp.asarray(value), jnp.asarray(0.9), jnp.asarray(0.3))
    assert wide.key.dtype == jnp.float64
    rounded = Observation(*(np.asarray(part, np.float32) for part in wide))
    for actual, expected in zip(
        RLS.write(*RLS.init(3, 4, 2.0), wide), RLS.write(*RLS.init(3, 4, 2.0), rounded), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("form", [RLS, SQRT], ids=["rls", "sqrt"])
@each_given
@pytest.mark.usefixtures("x64")
def test_correction_and_undo_keep_the_state_type(form, given):
    state = form.init(3, 4, 2.0)
    correction = form.correction(*state, given)
    after = form.apply(*state, correction, given)
    assert {part.dtype for part in (*correction, *after, *form.undo(*after, correction, given))} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize("name", [name for name in GIVEN if name not in ("python numbers", "mixed")])
@pytest.mark.usefixtures("x64")
def test_loop_keeps_the_state_type(name):
    observations = Observation(*(np.asarray(part)[None] for part in GIVEN[name]))
    M, P = jax.eval_shape(lambda alpha: depth_memory_loop(observations, 3, 4, alpha), 1.0)
    assert M.dtype == P.dtype == jnp.float32


@pytest.mark.parametrize("query", [np.array(KEY), np.float16(KEY), jnp.asarray(KEY, jnp.bfloat16)])
@pytest.mark.usefixtures("x64")
def test_read_has_the_memory_type(query):
    M, _ = init_state(3, 4, 1.0)
    assert rls_read(M, query).dtype == jnp.float32


@pytest.mark.parametrize("alpha", [2, 2.0, np.float64(2), np.float32(2), np.array(2), jnp.float32(2)], ids=repr)
@pytest.mark.parametrize("form", [RLS, SQRT], ids=["rls", "sqrt"])
@pytest.mark.usefixtures("x64")
def test_start_in_its_type(form, alpha):
    M, state = form.init(3, 4, alpha)
    assert M.dtype == state.dtype == jnp.float32
    # The square root of 2 squared: one rounding each.
    np.testing.assert_allclose(form.covariance(np.asarray(state)), 2 * np.eye(4), rtol=3e-7)


def test_numpy_state():
    M, P = (np.asarray(part) for part in init_state(3, 4, 2.0))
    assert RLS.write(M, P, GIVEN["numpy float64"])[0].dtype == jnp.float32
