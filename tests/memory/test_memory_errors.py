"""What the memory refuses, and in which words; and that traced numbers are never looked at."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depth_problems import FORMS
from ldm_jax import (
    Correction,
    Observation,
    additive_write,
    delta_write,
    depth_memory_loop,
    init_state,
    regression_objective,
    rls_read,
    rls_write,
    solve_depth_regression,
    sqrt_init_state,
)

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

GOOD = Observation(np.ones(4, np.float32), np.ones(3, np.float32), np.float32(0.9), np.float32(1))
GOOD_DEEP = Observation(
    np.ones((5, 4), np.float32), np.ones((5, 3), np.float32), np.full(5, 0.9, np.float32), np.ones(5, np.float32)
)
STATE = np.zeros((3, 4), np.float32), np.eye(4, dtype=np.float32)
CORRECTION = Correction(np.ones(3, np.float32), np.ones(4, np.float32), np.float32(1))


def undo(form, memory, inverse_covariance, observation):
    return form.undo(memory, inverse_covariance, CORRECTION, observation)


def apply(form, memory, inverse_covariance, observation):
    return form.apply(memory, inverse_covariance, CORRECTION, observation)


STEPS = {
    **{f"{name}_{step}": getattr(form, step) for name, form in FORMS.items() for step in ("write", "correction")},
    **{f"{name}_apply": partial(apply, form) for name, form in FORMS.items()},
    **{f"{name}_undo": partial(undo, form) for name, form in FORMS.items()},
    "additive_write": additive_write,
    "delta_write": delta_write,
}
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
DEEP = {
    "loop": partial(depth_memory_loop, value_dim=3, key_dim=4, alpha=1.0),
    "solve": partial(solve_depth_regression, alpha=1.0),
    "objective": partial(regression_objective, STATE[0], alpha=1.0),
}
each_deep = pytest.mark.parametrize("function", DEEP.values(), ids=DEEP)

BAD_NUMBERS = [
    ("forgetting", 0.0, "forgetting is 0.0"),
    ("forgetting", -0.5, "forgetting is -0.5"),
    ("forgetting", 1.5, "forgetting is 1.5"),
    ("forgetting", np.nan, "forgetting is nan"),
    ("forgetting", np.inf, "forgetting is inf"),
    ("importance", -2.0, "importance is -2.0"),
    ("importance", np.nan, "importance is nan"),
    ("importance", np.inf, "importance is inf"),
]
each_bad_number = pytest.mark.parametrize(("part", "number", "words"), BAD_NUMBERS)


@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, jnp.float32], ids=["python", "scalar", "numpy", "jax"])
@each_bad_number
def test_bad_number(part, number, words, kind):
    with pytest.raises(ValueError, match=re.escape(words)):
        rls_write(*STATE, GOOD._replace(**{part: kind(number)}))


@each_step
@each_bad_number
def test_every_step_refuses_a_bad_number(step, part, number, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        step(*STATE, GOOD._replace(**{part: number}))


@each_deep
@each_bad_number
def test_bad_number_at_one_depth(function, part, number, words):
    numbers = getattr(GOOD_DEEP, part).copy()
    numbers[3] = number
    with pytest.raises(ValueError, match=re.escape(words)):
        function(observations=GOOD_DEEP._replace(**{part: numbers}))


@each_step
@pytest.mark.parametrize(
    ("part", "shape", "words"),
    [
        ("key", (3,), "the key has shape (3,), but here it must be [K] = (4,)"),
        ("key", (2, 4), "the key has shape (2, 4), but here it must be [K] = (4,)"),
        ("value", (4,), "the value has shape (4,), but here it must be [V] = (3,)"),
        ("value", (), "the value has shape (), but here it must be [V] = (3,)"),
        ("forgetting", (1,), "forgetting has shape (1,), but here it must be [] = ()"),
        ("importance", (3,), "importance has shape (3,), but here it must be [] = ()"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_wrong_shape(step, part, shape, words, wrap):
    with pytest.raises(ValueError, match=re.escape(words)):
        wrap(step)(*STATE, GOOD._replace(**{part: np.ones(shape, np.float32)}))


@each_step
@pytest.mark.parametrize(
    ("memory", "inverse_covariance", "error", "words"),
    [
        (np.zeros(4, np.float32), STATE[1], ValueError, "the memory has shape (4,), but it must be [V, K]"),
        (np.zeros((2, 3, 4), np.float32), STATE[1], ValueError, "the memory has shape (2, 3, 4)"),
        (STATE[0], np.eye(3, dtype=np.float32), ValueError, "the inverse covariance has shape (3, 3)"),
        (STATE[0], STATE[1][0], ValueError, "the inverse covariance has shape (4,)"),
        (STATE[0], STATE[1].astype(np.float16), TypeError, "memory is float32 and the inverse covariance float16"),
        (STATE[0].astype(np.float16), STATE[1], TypeError, "memory is float16 and the inverse covariance float32"),
        (STATE[0].astype(int), STATE[1].astype(int), TypeError, "memory is int32 and the inverse covariance int32"),
    ],
)
def test_wrong_state(step, memory, inverse_covariance, error, words):
    with pytest.raises(error, match=re.escape(words)):
        step(memory, inverse_covariance, GOOD)


@pytest.mark.parametrize("init", [init_state, sqrt_init_state])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, 4, 0.0), ValueError, "alpha is 0.0"),
        ((3, 4, -1.0), ValueError, "alpha is -1.0"),
        ((3, 4, np.nan), ValueError, "alpha is nan"),
        ((3, 4, np.inf), ValueError, "alpha is inf"),
        ((3, 0, 1.0), ValueError, "key_dim is 0"),
        ((0, 4, 1.0), ValueError, "value_dim is 0"),
        ((3, 4, 1.0, jnp.int32), TypeError, "the state's type is int32"),
        ((3, 4, 1.0, jnp.complex64), TypeError, "the state's type is complex64"),
        ((3, 4, 1.0, jnp.float64), TypeError, "float64 state needs JAX's 64-bit mode"),
    ],
)
def test_wrong_start(init, arguments, error, words):
    with pytest.raises(error, match=re.escape(words)):
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
    with pytest.raises(ValueError, match=re.escape(f"alpha is {alpha}")):
        function(GOOD_DEEP, alpha=alpha)


@each_deep
@pytest.mark.parametrize(
    ("part", "shape", "words"),
    [
        ("key", (4,), "the keys have shape (4,) and the values (5, 3)"),
        ("value", (5,), "the keys have shape (5, 4) and the values (5,)"),
        ("value", (6, 3), "the value has shape (6, 3), but here it must be [N, V] = (5, 3)"),
        ("forgetting", (), "forgetting has shape (), but here it must be [N] = (5,)"),
        ("importance", (4,), "importance has shape (4,), but here it must be [N] = (5,)"),
    ],
)
def test_wrong_deep_shape(function, part, shape, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        function(observations=GOOD_DEEP._replace(**{part: np.ones(shape, np.float32)}))


def test_widths_that_are_not_the_observations():
    with pytest.raises(ValueError, match=r"value_dim is 4 and key_dim 3.*values of width 3 and keys of width 4"):
        depth_memory_loop(GOOD_DEEP, 4, 3, 1.0)


@pytest.mark.parametrize("name", ["solve", "objective"])
def test_a_regression_needs_an_observation(name):
    with pytest.raises(ValueError, match="there are no observations"):
        DEEP[name](observations=Observation(*(part[:0] for part in GOOD_DEEP)))


def test_objective_of_a_memory_of_another_shape():
    with pytest.raises(ValueError, match=re.escape("the memory has shape (4, 3), but here it must be [V, K] = (3, 4)")):
        regression_objective(STATE[0].T, GOOD_DEEP, 1.0)


@pytest.mark.parametrize(
    ("memory", "query", "words"),
    [
        (STATE[0], np.ones(3, np.float32), "the query has shape (3,), but here it must be [K] = (4,)"),
        (STATE[0][0], np.ones(4, np.float32), "the memory has shape (4,), but it must be [V, K]"),
    ],
)
def test_wrong_read(memory, query, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        rls_read(memory, query)


COMPILED = {step: jax.jit(step) for step in (*STEPS.values(), *DEEP.values())}  # once for all numbers


@each_step
@each_bad_number
def test_traced_numbers_are_not_looked_at(step, part, number, words):
    COMPILED[step](*STATE, GOOD._replace(**{part: np.float32(number)}))


def test_numbers_under_vmap_are_not_looked_at():
    write = jax.vmap(rls_write, in_axes=(None, None, Observation(None, None, 0, None)))
    jax.make_jaxpr(write)(*STATE, GOOD._replace(forgetting=np.float32([0.9, 1.5])))


@each_deep
@each_bad_number
def test_traced_depth_is_not_looked_at(function, part, number, words):
    COMPILED[function](observations=GOOD_DEEP._replace(**{part: np.full(5, number, np.float32)}))


@pytest.mark.parametrize("init", [init_state, sqrt_init_state])
def test_traced_alpha_is_not_looked_at(init):
    _, P = jax.jit(lambda alpha: init(3, 4, alpha))(-1.0)
    assert P.shape == (4, 4)


def primitives(jaxpr) -> set[str]:
    inner = [
        getattr(parameter, "jaxpr", parameter)
        for equation in jaxpr.eqns
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr"))
        if hasattr(parameter, "jaxpr") or hasattr(parameter, "eqns")
    ]
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(primitives, inner))


@each_step
def test_nothing_is_added_to_the_program(step):
    names = primitives(jax.make_jaxpr(step)(*STATE, GOOD).jaxpr)
    assert "mul" in names
    assert not [name for name in names if "check" in name or "callback" in name or "debug" in name]


def test_a_callback_would_be_seen():
    def write(memory, inverse_covariance, observation):
        jax.debug.print("{}", observation.forgetting)
        return rls_write(memory, inverse_covariance, observation)

    names = primitives(jax.make_jaxpr(jax.jit(write))(*STATE, GOOD).jaxpr)
    assert [name for name in names if "callback" in name or "debug" in name]


@pytest.mark.parametrize(("value_dim", "key_dim", "words"), [(3, -2, "key_dim is -2"), (-1, 2, "value_dim is -1")])
def test_negative_widths(value_dim, key_dim, words):
    with pytest.raises(ValueError, match=words):
        init_state(value_dim, key_dim, 1.0)


@pytest.mark.parametrize(("forgetting", "importance"), [(1e-60, 1.0), (0.9, 1e300)])
def test_numbers_that_the_state_cannot_hold(forgetting, importance):
    # admissible in float64, but 0 or infinite in the float32 of the state
    with pytest.raises(ValueError, match=r"(1e-60|1e\+300), but in float32 it must"):
        rls_write(*init_state(1, 1, 1.0), Observation(np.ones(1), np.ones(1), forgetting, importance))
    with pytest.raises(ValueError, match=r"alpha is 1e\+300, but in float32"):
        init_state(1, 1, 1e300)


def test_oracle_takes_numbers_of_another_type(x64):
    observations = Observation(*(jnp.ones(shape, jnp.float32) for shape in ((2, 3), (2, 4), (2,), (2,))))
    M, P = solve_depth_regression(observations, np.float64(1.0))
    assert M.dtype == P.dtype == jnp.float32
    assert regression_objective(np.zeros((4, 3)), observations, np.float64(1.0)) == 8.0


def test_alpha_is_one_number():
    with pytest.raises(ValueError, match=r"alpha has shape \(2,\)"):
        init_state(3, 2, np.ones(2))


def test_forgetting_that_some_hardware_takes_for_zero():
    with pytest.raises(ValueError, match="forgetting is 1e-39"):
        rls_write(*init_state(1, 1, 1.0), Observation(np.ones(1), np.ones(1), 1e-39, 1.0))
