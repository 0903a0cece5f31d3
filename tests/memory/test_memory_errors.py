"""Errors of the memory functions, which name the argument and its value; and traced values, which are not checked."""

import re
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import ADDITIVE, DELTA, REGRESSIONS
from ldm_jax import (
    Covariance,
    Observation,
    depth_memory_loop,
    init_state,
    regression_objective,
    rls_correction,
    rls_read,
    rls_write,
    solve_depth_regression,
    sqrt_init_state,
    sqrt_rls_correction,
)

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

GOOD = Observation(np.ones(4, np.float32), np.ones(3, np.float32), np.float32(0.9), np.float32(1))
GOOD_DEEP = Observation(
    np.ones((5, 4), np.float32), np.ones((5, 3), np.float32), np.full(5, 0.9, np.float32), np.ones(5, np.float32)
)
STATE = np.zeros((3, 4), np.float32), np.eye(4, dtype=np.float32)
CORRECTIONS = {
    "rls": rls_correction(*STATE, GOOD),
    "sqrt_rls": sqrt_rls_correction(STATE[0], Covariance(STATE[1], 1.0), GOOD),
}


def step_of(name, step):
    """A step as a function of M, a matrix and an observation."""
    function = getattr(REGRESSIONS[name], step)
    corrections = () if step in ("write", "correction") else (CORRECTIONS[name],)
    state = (lambda matrix: matrix) if name == "rls" else (lambda matrix: Covariance(matrix, np.float32(1)))
    return lambda memory, matrix, observation: function(memory, state(matrix), *corrections, observation)


STEPS = {"additive_write": ADDITIVE.write, "delta_write": DELTA.write}
for name in REGRESSIONS:
    STEPS |= {f"{name}_{step}": step_of(name, step) for step in ("write", "correction", "apply", "undo")}
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
DEEP = {
    "loop": partial(depth_memory_loop, value_dim=3, key_dim=4, alpha=1.0),
    "solve": partial(solve_depth_regression, alpha=1.0),
    "objective": partial(regression_objective, STATE[0], alpha=1.0),
}
each_deep = pytest.mark.parametrize("function", DEEP.values(), ids=DEEP)

BAD_NUMBERS = [
    *(("forgetting", number) for number in (0.0, -0.5, 1.5, np.nan, np.inf)),
    *(("importance", number) for number in (-2.0, np.nan, np.inf)),
]
each_bad_number = pytest.mark.parametrize(("part", "number"), BAD_NUMBERS)


def assert_value_error(pattern, function, *args, **kwargs):
    with pytest.raises(ValueError, match=pattern):
        function(*args, **kwargs)


@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, jnp.float32], ids=["python", "scalar", "numpy", "jax"])
@each_bad_number
def test_bad_number(part, number, kind):
    assert_value_error(f"{part} is {number}", rls_write, *STATE, GOOD._replace(**{part: kind(number)}))


@each_step
@each_bad_number
def test_bad_number_in_each_step(step, part, number):
    assert_value_error(f"{part} is {number}", step, *STATE, GOOD._replace(**{part: number}))


@each_deep
@each_bad_number
def test_bad_number_at_one_depth(function, part, number):
    numbers = getattr(GOOD_DEEP, part).copy()
    numbers[3] = number
    assert_value_error(f"{part} is {number}", function, observations=GOOD_DEEP._replace(**{part: numbers}))


@each_step
@pytest.mark.parametrize(
    ("part", "shape", "expected"),
    [
        ("key", (3,), "[K] = (4,)"),
        ("key", (2, 4), "[K] = (4,)"),
        ("value", (4,), "[V] = (3,)"),
        ("value", (), "[V] = (3,)"),
        ("forgetting", (1,), "[] = ()"),
        ("importance", (3,), "[] = ()"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_wrong_shape(step, part, shape, expected, wrap):
    pattern = f"{part}.*{re.escape(str(shape))}.*{re.escape(expected)}"
    assert_value_error(pattern, wrap(step), *STATE, GOOD._replace(**{part: np.ones(shape, np.float32)}))


@each_step
@pytest.mark.parametrize(
    ("memory", "inverse_covariance", "error", "pattern"),
    [
        (np.zeros(4, np.float32), STATE[1], ValueError, r"memory.*\(4,\).*\[V, K\]"),
        (np.zeros((2, 3, 4), np.float32), STATE[1], ValueError, r"memory.*\(2, 3, 4\)"),
        (STATE[0], np.eye(3, dtype=np.float32), ValueError, r"inverse covariance.*\(3, 3\)"),
        (STATE[0], STATE[1][0], ValueError, r"inverse covariance.*\(4,\)"),
        (STATE[0], STATE[1].astype(np.float16), TypeError, "memory is float32.*inverse covariance float16"),
        (STATE[0].astype(np.float16), STATE[1], TypeError, "memory is float16.*inverse covariance float32"),
        (STATE[0].astype(int), STATE[1].astype(int), TypeError, "memory is int32.*inverse covariance int32"),
    ],
)
def test_wrong_state(step, memory, inverse_covariance, error, pattern):
    with pytest.raises(error, match=pattern):
        step(memory, inverse_covariance, GOOD)


@pytest.mark.parametrize("init", [init_state, sqrt_init_state])
@pytest.mark.parametrize(
    ("arguments", "error", "pattern"),
    [
        ((3, 4, 0.0), ValueError, "alpha is 0.0"),
        ((3, 4, -1.0), ValueError, "alpha is -1.0"),
        ((3, 4, np.nan), ValueError, "alpha is nan"),
        ((3, 4, np.inf), ValueError, "alpha is inf"),
        ((3, 4, 1e300), ValueError, r"alpha is 1e\+300.*float32"),
        ((3, 4, 1e9), ValueError, r"alpha is 1000000000.0.*at most 1e\+0[48]"),
        ((3, 4, np.ones(2)), ValueError, r"alpha.*\(2,\)"),
        ((3, 0, 1.0), ValueError, "key_dim is 0"),
        ((0, 4, 1.0), ValueError, "value_dim is 0"),
        ((3, -2, 1.0), ValueError, "key_dim is -2"),
        ((-1, 2, 1.0), ValueError, "value_dim is -1"),
        ((3, 4, 1.0, jnp.int32), TypeError, "dtype is int32"),
        ((3, 4, 1.0, jnp.complex64), TypeError, "dtype is complex64"),
        ((3, 4, 1.0, jnp.float64), TypeError, "dtype is float64.*jax_enable_x64"),
    ],
)
def test_wrong_arguments_of_init(init, arguments, error, pattern):
    with pytest.raises(error, match=pattern):
        init(*arguments)


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize(
    "function",
    [
        solve_depth_regression,
        partial(regression_objective, STATE[0]),
        lambda observations, alpha: depth_memory_loop(observations, 3, 4, alpha),
    ],
    ids=["solve", "objective", "loop"],
)
def test_wrong_alpha(function, alpha):
    assert_value_error(f"alpha is {alpha}", function, GOOD_DEEP, alpha=alpha)


@each_deep
@pytest.mark.parametrize(
    ("part", "shape", "pattern"),
    [
        ("key", (4,), r"keys.*\(4,\).*values \(5, 3\)"),
        ("value", (5,), r"keys.*\(5, 4\).*values \(5,\)"),
        ("value", (6, 3), r"value.*\(6, 3\).*\[N, V\] = \(5, 3\)"),
        ("forgetting", (), r"forgetting.*\(\).*\[N\] = \(5,\)"),
        ("importance", (4,), r"importance.*\(4,\).*\[N\] = \(5,\)"),
    ],
)
def test_wrong_deep_shape(function, part, shape, pattern):
    assert_value_error(pattern, function, observations=GOOD_DEEP._replace(**{part: np.ones(shape, np.float32)}))


def test_widths_of_a_loop_must_be_those_of_the_observations():
    assert_value_error(r"value_dim is 4.*key_dim 3", depth_memory_loop, GOOD_DEEP, 4, 3, 1.0)


@pytest.mark.parametrize("name", ["solve", "objective"])
def test_a_regression_needs_an_observation(name):
    no_observations = Observation(*(part[:0] for part in GOOD_DEEP))
    assert_value_error("observations is 0", DEEP[name], observations=no_observations)


def test_objective_of_a_memory_of_another_shape():
    pattern = r"memory.*\(4, 3\).*\[V, K\] = \(3, 4\)"
    assert_value_error(pattern, regression_objective, STATE[0].T, GOOD_DEEP, 1.0)


@pytest.mark.parametrize(
    ("memory", "query", "pattern"),
    [
        (STATE[0], np.ones(3, np.float32), r"query.*\(3,\).*\[K\] = \(4,\)"),
        (STATE[0][0], np.ones(4, np.float32), r"memory.*\(4,\).*\[V, K\]"),
    ],
)
def test_wrong_read(memory, query, pattern):
    assert_value_error(pattern, rls_read, memory, query)


COMPILED = {step: jax.jit(step) for step in (*STEPS.values(), *DEEP.values())}  # shared by all numbers


@each_step
@each_bad_number
def test_traced_numbers_are_not_checked(step, part, number):
    COMPILED[step](*STATE, GOOD._replace(**{part: np.float32(number)}))


def test_numbers_under_vmap_are_not_checked():
    write = jax.vmap(rls_write, in_axes=(None, None, Observation(None, None, 0, None)))
    jax.make_jaxpr(write)(*STATE, GOOD._replace(forgetting=np.float32([0.9, 1.5])))


@each_deep
@each_bad_number
def test_traced_deep_numbers_are_not_checked(function, part, number):
    COMPILED[function](observations=GOOD_DEEP._replace(**{part: np.full(5, number, np.float32)}))


@pytest.mark.parametrize("init", [init_state, sqrt_init_state])
def test_traced_alpha_is_not_checked(init):
    M, _ = jax.jit(lambda alpha: init(3, 4, alpha))(-1.0)
    assert M.shape == (3, 4)


def primitives(jaxpr) -> set[str]:
    inner = [
        getattr(parameter, "jaxpr", parameter)
        for equation in jaxpr.eqns
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr"))
        if hasattr(parameter, "jaxpr") or hasattr(parameter, "eqns")
    ]
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(primitives, inner))


@each_step
def test_checks_add_nothing_to_the_program(step):
    names = primitives(jax.make_jaxpr(step)(*STATE, GOOD).jaxpr)
    assert "mul" in names
    assert not [name for name in names if "check" in name or "callback" in name or "debug" in name]


def test_primitives_finds_callbacks():
    def write(memory, inverse_covariance, observation):
        jax.debug.print("{}", observation.forgetting)
        return rls_write(memory, inverse_covariance, observation)

    names = primitives(jax.make_jaxpr(jax.jit(write))(*STATE, GOOD).jaxpr)
    assert [name for name in names if "callback" in name or "debug" in name]


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@each_step
def test_keys_and_values_must_be_finite(step, part, number):
    assert_value_error(f"{part} is {number}", step, *STATE, GOOD._replace(**{part: number * getattr(GOOD, part)}))


@pytest.mark.parametrize(("size", "importance"), [(1, 3e38), (3e18, 1.0)])
@pytest.mark.parametrize("step", ["rls_write", "sqrt_rls_write"])
def test_importance_that_leaves_no_digit_of_the_covariance(step, size, importance):
    observation = GOOD._replace(key=size * GOOD.key, importance=importance)
    assert_value_error("importance is .*must be at most", STEPS[step], *STATE, observation)


def test_a_state_that_is_not_finite():
    nothing = Observation(*(np.repeat(part[None], 200, axis=0) for part in GOOD._replace(forgetting=np.float32(0.5))))
    nothing = nothing._replace(importance=np.zeros(200))
    for function in (DEEP["loop"], DEEP["solve"]):
        assert_value_error("not finite", function, observations=nothing)
    assert_value_error("inverse covariance is inf", rls_write, STATE[0], np.inf * np.ones((4, 4), np.float32), GOOD)


def test_observations_can_be_exported():
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(jax.jit(rls_write))(*STATE, GOOD)
    restored = jax.export.deserialize(exported.serialize())
    assert jax.tree.structure(restored.call(*STATE, GOOD)) == jax.tree.structure(STATE)


@pytest.mark.parametrize(("forgetting", "importance"), [(1e-60, 1.0), (0.9, 1e300)])
def test_numbers_outside_of_the_range_of_the_state(forgetting, importance):
    # Valid in float64, but 0 or infinite in the float32 of the state.
    observation = Observation(np.ones(1), np.ones(1), forgetting, importance)
    assert_value_error(r"(1e-60|1e\+300).*float32", rls_write, *init_state(1, 1, 1.0), observation)


def test_forgetting_that_is_subnormal():
    # Hardware that flushes subnormal numbers would make it 0.
    observation = Observation(np.ones(1), np.ones(1), 1e-39, 1.0)
    assert_value_error("forgetting is 1e-39", rls_write, *init_state(1, 1, 1.0), observation)


def test_solution_and_objective_accept_numbers_of_another_type(x64):
    observations = Observation(*(jnp.ones(shape, jnp.float32) for shape in ((2, 3), (2, 4), (2,), (2,))))
    M, P = jax.eval_shape(lambda alpha: solve_depth_regression(observations, alpha), np.float64(1.0))
    assert M.dtype == P.dtype == jnp.float32
    assert regression_objective(np.zeros((4, 3)), observations, np.float64(1.0)) == 8.0
