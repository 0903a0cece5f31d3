"""Depth regressions solved with 50 digits by another program: the writes, the loop and the batch solution agree."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from depth_problems import REGRESSIONS, cast, python_loop, relative
from ldm_jax import Observation, depth_memory_loop, solve_depth_regression

CASES = json.loads((Path(__file__).parent / "depth_regression.json").read_text())["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])

INIT = {
    name: jax.jit(regression.init, static_argnames=("value_dim", "key_dim", "dtype"))
    for name, regression in REGRESSIONS.items()
}
WRITE = {name: jax.jit(regression.write) for name, regression in REGRESSIONS.items()}
loop = jax.jit(depth_memory_loop, static_argnames=("value_dim", "key_dim"))
solve = jax.jit(solve_depth_regression)


def observations_of(case, dtype) -> Observation:
    return cast(Observation(case["key"], case["value"], case["forgetting"], case["importance"]), dtype)


def assert_solved(case, memory, inverse_covariance, tolerance):
    assert relative(memory, case["memory"]) < tolerance
    assert relative(inverse_covariance, case["inverse_covariance"]) < tolerance


@each_case
@pytest.mark.parametrize("name", REGRESSIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_writes(case, name, dtype):
    observations = observations_of(case, dtype)
    # The tolerance of a case depends on its condition number: 2e-6, or 17 float32 roundings, and 2e-4 for the
    # ill-conditioned ones. Roundings of float64 are 5e8 times smaller.
    tolerance = case["float32_relative_tolerance"] if dtype == "float32" else 1e-10
    with jax.enable_x64(dtype == "float64"):
        start = INIT[name](observations.value.shape[1], observations.key.shape[1], case["alpha"], dtype=dtype)
        M, state = python_loop(WRITE[name], start, observations)
        assert {part.dtype for part in jax.tree.leaves((M, state))} == {np.dtype(dtype)}
        assert_solved(case, M, REGRESSIONS[name].covariance(state), tolerance)


@each_case
def test_loop(case):
    observations = observations_of(case, np.float32)
    M, P = loop(observations, observations.value.shape[1], observations.key.shape[1], case["alpha"])
    assert_solved(case, M, P, case["float32_relative_tolerance"])


@each_case
@pytest.mark.usefixtures("x64")
def test_batch_solution(case):
    # The largest condition number of the cases is below 1e5, and roundings of float64 are 1e-16.
    assert_solved(case, *solve(observations_of(case, np.float64), case["alpha"]), 1e-10)
