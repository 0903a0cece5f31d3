"""The same program in float64: what is left of a difference there is no rounding of float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

INLINED = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with every float32 in it, computed or carried, a float64. Its arguments may be float32.

    The library keeps states, controllers and losses in float32 whatever it is given, so types of arguments alone do
    not do this; the traced program is computed anew, operation for operation, layout for layout.
    """

    def doubled(*args: Any) -> Any:
        with jax.enable_x64(False):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        with jax.enable_x64(True):
            run = jax.jit(lambda *leaves: _evaluate(program.jaxpr, program.consts, leaves))
            results = run(*(_wide(leaf) for leaf in jax.tree.leaves(args)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return doubled


def _evaluate(jaxpr: Jaxpr, consts: Any, args: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(_wide, [*consts, *args]), strict=True))
    read = lambda atom: _wide(np.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, Literal) else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        found = _apply(equation, [read(atom) for atom in equation.invars])
        values |= zip(equation.outvars, found, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, args: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in INLINED:
        inner = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
        closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        return _evaluate(closed.jaxpr, closed.consts, args)
    if primitive.name == "reduce_precision" and params["mantissa_bits"] == 23:
        return args  # what a remat policy saves is rounded to float32, which it is already
    if primitive.name == "cond":
        # Of a choice by platform the kernel for another machine cannot be had in float64, and is not run here.
        plain = [branch for branch in params["branches"] if "pallas_call" not in str(branch)]
        if len(plain) == 1:
            return _evaluate(plain[0].jaxpr, plain[0].consts, args[1:])
    if primitive.name == "shard_map":
        run = jax.shard_map(
            lambda *args: _evaluate(params["jaxpr"], (), args),
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
        )
        return run(*args)
    # The mesh of the operation's own context: inside shard_map it is another one.
    with equation.ctx.manager:
        results = primitive.bind(*args, **jax.tree.map(_wide_param, params, is_leaf=lambda x: x is None))
    return list(results) if primitive.multiple_results else [results]


def _wide_param(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        arguments = [jax.ShapeDtypeStruct(aval.shape, _wide_type(aval.dtype)) for aval in value.in_avals]
        return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args))(*arguments)
    if isinstance(value, Jaxpr):
        closed = _wide_param(ClosedJaxpr(value, ()))
        assert not closed.consts
        return closed.jaxpr
    return _wide_type(value) if isinstance(value, np.dtype) else value


def _wide(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if jnp.result_type(x) == jnp.float32 else x


def _wide_type(dtype: Any) -> Any:
    return np.dtype(np.float64) if dtype == np.float32 else dtype
