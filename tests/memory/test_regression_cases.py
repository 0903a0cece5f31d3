"""Depth regressions solved elsewhere with 50 digits: every form and the oracle must end with the same numbers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from depth_problems import FORMS, cast, relative
from ldm_jax import Observation, depth_memory_loop, solve_depth_regression

CASES = json.loads((Path(__file__).parent / "depth_regression.json").read_text())["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])

START = {name: jax.jit(form.init, static_argnames=("value_dim", "key_dim", "dtype")) for name, form in FORMS.items()}
WRITE = {name: jax.jit(form.write) for name, form in FORMS.items()}
loop = jax.jit(depth_memory_loop, static_argnames=("value_dim", "key_dim"))
solve = jax.jit(solve_depth_regression)


def observations(case, dtype) -> Observation:
    return cast(Observation(case["key"], case["value"], case["forgetting"], case["importance"]), dtype)


def assert_solved(case, memory, inverse_covariance, tolerance):
    assert relative(memory, case["memory"]) < tolerance
    assert relative(inverse_covariance, case["inverse_covariance"]) < tolerance


@each_case
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_writes(case, name, dtype):
    given = observations(case, dtype)
    # The case knows its conditioning: 2e-6 is 17 float32 roundings, the ill-conditioned ones allow 2e-4, and float64
    # rounds 5e8 times finer.
    tolerance = case["float32_relative_tolerance"] if dtype == "float32" else 1e-10
    with jax.enable_x64(dtype == "float64"):
        M, state = START[name](given.value.shape[1], given.key.shape[1], case["alpha"], dtype=dtype)
        for observation in zip(*given, strict=True):
            M, state = WRITE[name](M, state, Observation(*observation))
        assert M.dtype == state.dtype == dtype
        assert_solved(case, M, FORMS[name].covariance(np.asarray(state)), tolerance)


@each_case
def test_loop(case):
    given = observations(case, np.float32)
    M, P = loop(given, given.value.shape[1], given.key.shape[1], case["alpha"])
    assert_solved(case, M, P, case["float32_relative_tolerance"])


@each_case
@pytest.mark.usefixtures("x64")
def test_oracle(case):
    # The largest condition number among the cases is below 1e5, and float64 rounds at 1e-16.
    assert_solved(case, *solve(observations(case, np.float64), case["alpha"]), 1e-10)
