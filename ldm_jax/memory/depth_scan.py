"""A scan over stacked layers with three backward modes.

The state of a depth memory is K times as wide as the stream. Plain differentiation saves the state of every layer. It
can instead be computed again, or restored from the state after the layer by undoing the layer's writes.
"""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

Step = Callable[[Any, Any], tuple[Any, Any]]
Undo = Callable[[Any, Any, Any], Any]


class Backward(enum.StrEnum):
    """What is saved for the backward pass of each layer.

    stored: all intermediate values. remat: the state before the layer; the layer is computed again. reversible: the
    layer's residual; the state before the layer is restored from the state after it, and the layer is computed again.
    """

    STORED = "stored"
    REMAT = "remat"
    REVERSIBLE = "reversible"


def depth_scan(
    step: Step,
    state: Any,
    layers: Any,
    *,
    backward: Backward = Backward.REMAT,
    undo: Undo | None = None,
    scan: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Any:
    """The state after all layers: `state, _ = step(layer, state)` for each layer in order.

    With `reversible`, the backward pass visits the layers in reverse order. For each layer, `undo` restores the state
    before it, the step is computed again, and the cotangent is pulled back through it. Only the final state and the
    residuals are saved, so memory grows with depth by the residuals alone. `undo` need not be exact to the bit: the
    gradient is that of the step at the state that `undo` returns.

    Composes with `jit`, `vmap`, `grad`, sharded arrays and itself. Arrays that `step` closes over are differentiated;
    arrays that `undo` closes over, and integers, have zero gradients. Inside `jax.shard_map`, `reversible` needs
    `check_vma=False`. `reversible` does not support forward-mode differentiation (`jax.jvp`, `jax.jacfwd`,
    `jax.linearize`); `remat` does.

    Args:
        step: `(layer, state) -> (state, residual)`. The state is a pytree of arrays whose structure, shapes and types
            do not change (they may if `scan` is false). `residual` is a pytree of arrays; only `reversible` uses it.
        state: the state before the first layer.
        layers: a pytree of arrays with a leading depth axis.
        backward: what is saved for the backward pass.
        undo: `(layer, state after, residual) -> state before`. Required by `reversible`.
        scan: use a `jax.lax.scan`, which compiles one layer, instead of a Python loop.
        policy: what `remat` saves in addition to the states (`jax.checkpoint_policies`).

    Raises:
        ValueError: `backward` is not a mode; the layers have no arrays, or arrays of different depths; `reversible`
            without `undo`, or with an `undo` that returns another structure, shape or type.
        TypeError: forward-mode differentiation of `reversible`, where JAX reports it during tracing.

    Source: reversible networks (Gomez et al., arXiv 1707.04585) restore earlier states from later ones. The residual of
    a write is ours.
    """
    if backward not in list(Backward):
        raise ValueError(f"backward is {backward!r}, but it must be one of {', '.join(Backward)}.")
    _check_layers(layers)
    match Backward(backward):
        case Backward.STORED:
            return _forward(step, state, layers, scan)[0]
        case Backward.REMAT:
            body = jax.checkpoint(lambda layer, state: step(layer, state)[0], prevent_cse=not scan, policy=policy)
            return _forward(lambda layer, state: (body(layer, state), None), state, layers, scan)[0]
        case Backward.REVERSIBLE:
            if undo is None:
                raise ValueError("backward is reversible, but undo is None: pass undo, or use backward=remat.")
            run = _scan_reversible if scan else _loop_reversible
            try:
                return run(step, undo, _promoted(step, state, layers, scan), layers)
            except TypeError as error:
                if "forward-mode" not in str(error):
                    raise
                raise TypeError(
                    "backward is reversible, which does not support forward-mode differentiation (jvp, jacfwd, "
                    "linearize): use backward=remat (mixer.backward in a config), or reverse mode."
                ) from error


def depth_map(step: Step, state: Any, layers: Any, *, scan: bool = True) -> tuple[Any, Any]:
    """The state after all layers, and the second output of every step, stacked over depth: for decoding."""
    _check_layers(layers)
    state, each = _forward(step, state, layers, scan)
    return state, each if scan else jax.tree.map(lambda *parts: jnp.stack(parts), *each)


def _check_layers(layers: Any) -> None:
    """Raises ValueError unless all leaves have a leading depth axis of one length."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(layers)]
    depths = {shape[:1] for shape in shapes}
    if len(depths) != 1 or () in depths:
        raise ValueError(
            f"layers has leaves of shapes {shapes}, but it must have at least one leaf, and all must have a leading "
            "depth axis of the same length."
        )


def _forward(step: Step, state: Any, layers: Any, scan: bool) -> tuple[Any, Any]:
    """The final state and the residuals, which are stacked if `scan` is true and a list otherwise."""
    if scan:
        return jax.lax.scan(lambda state, layer: step(layer, state), state, layers)
    residual = []
    for layer in _unstacked(layers):
        state, part = step(layer, state)
        residual.append(part)
    return state, residual


def _unstacked(layers: Any) -> list[Any]:
    # The gradient of lax.split is one concatenation; that of indexing is one scatter per layer.
    leaves, tree = jax.tree.flatten(layers)
    by_leaf = [jax.lax.split(leaf, (1,) * leaf.shape[0]) for leaf in leaves]
    return [jax.tree.unflatten(tree, [part[0] for part in parts]) for parts in zip(*by_leaf, strict=True)]


def _one(layers: Any) -> Any:
    """The shapes and types of one layer."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def _promoted(step: Step, state: Any, layers: Any, scan: bool) -> Any:
    """The first state, with leaves that the other modes promote in the types of the state after a step.

    A `jax.lax.scan` promotes weakly typed leaves. A Python loop accepts integers, too.
    """

    def promotes(leaf: Any) -> bool:
        return jnp.asarray(leaf).aval.weak_type or not (scan or _is_float(leaf))

    if not any(map(promotes, jax.tree.leaves(state))):
        return state
    after, _ = jax.eval_shape(step, _one(layers), state)
    if jax.tree.structure(after) != jax.tree.structure(state):
        return state
    return jax.tree.map(lambda leaf, new: jnp.asarray(leaf, new.dtype) if promotes(leaf) else leaf, state, after)


def _scan_reversible(step: Step, undo: Undo, state: Any, layers: Any) -> Any:
    """`reversible` by a `jax.lax.scan`. The backward pass is also a scan, so that it compiles one layer."""
    layer = _one(layers)
    run_step, step_arrays, (after, residual) = _explicit(step, layer, state)
    run_undo, undo_arrays, before = _explicit(undo, layer, state, residual)
    _check_state_before(before, after)  # a step that changes the type of the state is an error of the scan below

    @jax.custom_vjp
    def run(arrays: Any, layers: Any, state: Any) -> Any:
        return forward(arrays, layers, state)[0]

    def forward(arrays: Any, layers: Any, state: Any) -> tuple[Any, Any]:
        state, residual = jax.lax.scan(lambda state, layer: run_step(arrays[0], layer, state), state, layers)
        return state, (arrays, layers, state, residual)

    def pull_back(saved: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        arrays, layers, state, residual = saved

        def down(carry: Any, each: Any) -> tuple[Any, Any]:
            state, cotangent, total = carry
            layer, residual = each
            # Without the barrier, XLA for TPUs undoes the writes again for every use of the state, using more memory.
            state = jax.lax.optimization_barrier(run_undo(arrays[1], layer, state, residual))
            of_arrays, of_layer, cotangent = _pull_step(run_step, arrays[0], layer, state, cotangent)
            return (state, cotangent, jax.tree.map(jnp.add, total, of_arrays)), of_layer

        zeros = [jnp.zeros_like(leaf) for leaf in _differentiable(arrays[0])]
        carry = (state, _differentiable(cotangent), zeros)
        (_, cotangent, total), of_layers = jax.lax.scan(down, carry, (layers, residual), reverse=True)
        of_arrays = _with_rest(arrays[0], total), _with_rest(arrays[1], None)
        return of_arrays, _with_rest(layers, of_layers), _with_rest(state, cotangent)

    run.defvjp(forward, pull_back)
    return run((step_arrays, undo_arrays), layers, state)


def _loop_reversible(step: Step, undo: Undo, state: Any, layers: Any) -> Any:
    """`reversible` by a Python loop: the structure of the state may change between layers (a growing cache)."""
    each = _unstacked(layers)
    steps, undos, shapes = [], [], state
    for layer in each:
        before = shapes
        run_step, arrays, (shapes, residual) = _explicit(step, layer, before)
        steps.append((run_step, arrays))
        run_undo, arrays, restored = _explicit(undo, layer, shapes, residual)
        undos.append((run_undo, arrays))
        _check_state_before(restored, before)

    @jax.custom_vjp
    def run(arrays: Any, layers: Any, state: Any) -> Any:
        return forward(arrays, layers, state)[0]

    def forward(arrays: Any, layers: Any, state: Any) -> tuple[Any, Any]:
        residuals = []
        for (step, _), (constants, _), layer in zip(steps, arrays, layers, strict=True):
            state, residual = step(constants, layer, state)
            residuals.append(residual)
        return state, (arrays, layers, state, residuals)

    def pull_back(saved: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        arrays, layers, state, residuals = saved
        cotangent, of_arrays, of_layers = _differentiable(cotangent), [], []
        for (step, _), (undo, _), constants, layer, residual in reversed(
            list(zip(steps, undos, arrays, layers, residuals, strict=True))
        ):
            # Without the barrier, common-subexpression elimination would save and reuse the values of the forward pass.
            state, residual, cotangent = jax.lax.optimization_barrier((state, residual, cotangent))
            state = undo(constants[1], layer, state, residual)
            of_constants, of_layer, cotangent = _pull_step(step, constants[0], layer, state, cotangent)
            of_arrays.append((_with_rest(constants[0], of_constants), _with_rest(constants[1], None)))
            of_layers.append(_with_rest(layer, of_layer))
        return of_arrays[::-1], of_layers[::-1], _with_rest(state, cotangent)

    run.defvjp(forward, pull_back)
    return run([(a, b) for (_, a), (_, b) in zip(steps, undos, strict=True)], each, state)


def _check_state_before(restored: Any, before: Any) -> None:
    """Raises ValueError unless `undo` returns the structure, shapes and types of the state before the step."""
    types = lambda tree: jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)  # noqa: E731
    found, expected = types(restored), types(before)
    if found != expected:
        raise ValueError(
            f"undo returns {found}, but the state before the step is {expected}: return the same structure, shapes and "
            "types."
        )


def _explicit(function: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], list[Any], Any]:
    """The function with its closed-over arrays as an explicit first argument, those arrays, and its output's shapes.

    `jax.custom_vjp` does not support closed-over traced arrays, such as masks, positions and other parameters.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    tree = jax.tree.structure(shapes)

    def explicit(arrays: list[Any], *args: Any) -> Any:
        return jax.tree.unflatten(tree, jaxpr_as_fun(jaxpr.replace(consts=arrays))(*jax.tree.leaves(args)))

    return explicit, list(jaxpr.consts), shapes


def _pull_step(
    step: Callable[..., Any], arrays: Any, layer: Any, state: Any, cotangent: list[Any]
) -> tuple[Any, Any, Any]:
    """The cotangents of a step's closed-over arrays, layer and state, from that of its output; without integers."""
    arguments = (arrays, layer, state)

    def floats_after(*floats: list[Any]) -> list[Any]:
        return _differentiable(step(*map(_replaced, arguments, floats))[0])

    return jax.vjp(floats_after, *map(_differentiable, arguments))[1](cotangent)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _differentiable(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _replaced(tree: Any, floats: list[Any]) -> Any:
    remaining = iter(floats)
    return jax.tree.map(lambda leaf: next(remaining) if _is_float(leaf) else leaf, tree)


def _with_rest(tree: Any, floats: list[Any] | None) -> Any:
    """The cotangent of a tree from those of its floating leaves (None: zeros); other leaves get float0 zeros."""
    floats = [jnp.zeros_like(leaf) for leaf in _differentiable(tree)] if floats is None else floats
    nothing = jax.tree.map(lambda leaf: leaf if _is_float(leaf) else np.zeros(jnp.shape(leaf), jax.dtypes.float0), tree)
    remaining = iter(floats)
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == jax.dtypes.float0 else next(remaining), nothing)
