"""Runs a float32 program in float64, so that differences between programs are not those of float32 rounding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

INLINED = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with every float32 of its computation replaced by float64. Its arguments may be float32.

    The library computes states, coefficients and losses in float32 for all types of arguments, so passing float64
    arguments is not enough. The function is traced, and its operations are evaluated in float64 with the same sharding.
    """

    def run_in_float64(*args: Any) -> Any:
        with jax.enable_x64(False):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        with jax.enable_x64(True):
            run = jax.jit(lambda *leaves: _evaluate(program.jaxpr, program.consts, leaves))
            results = run(*(_to_float64(leaf) for leaf in jax.tree.leaves(args)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run_in_float64


def _evaluate(jaxpr: Jaxpr, consts: Any, args: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(_to_float64, [*consts, *args]), strict=True))

    def read(atom: Any) -> Any:
        return _to_float64(np.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(atom) for atom in equation.invars])
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, args: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in INLINED:
        inner = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
        closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        return _evaluate(closed.jaxpr, closed.consts, args)
    if primitive.name == "reduce_precision" and params["mantissa_bits"] == 23:
        return args  # remat policies round what they save to float32, which would not be float64
    if primitive.name == "cond":
        # A choice by platform: the kernels, which are for other platforms, do not support float64.
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
    # The context has the operation's mesh, which is another one inside shard_map.
    with equation.ctx.manager:
        results = primitive.bind(*args, **jax.tree.map(_float64_param, params, is_leaf=lambda x: x is None))
    return list(results) if primitive.multiple_results else [results]


def _float64_param(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        arguments = [jax.ShapeDtypeStruct(aval.shape, _float64_type(aval.dtype)) for aval in value.in_avals]
        return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args))(*arguments)
    if isinstance(value, Jaxpr):
        closed = _float64_param(ClosedJaxpr(value, ()))
        assert not closed.consts
        return closed.jaxpr
    return _float64_type(value) if isinstance(value, np.dtype) else value


def _to_float64(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if jnp.result_type(x) == jnp.float32 else x


def _float64_type(dtype: Any) -> Any:
    return np.dtype(np.float64) if dtype == np.float32 else dtype
