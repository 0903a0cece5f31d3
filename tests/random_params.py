"""Random parameters for modules, made without compiling their initialisers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

FAN_IN_AXIS = {"kernel": -2, "phi": -2, "carry": -2, "embedding": -1}


def random_params(shapes: Any, seed: int = 0) -> Any:
    """Random values for a tree of shapes: matrices with variance 1 / fan-in, other parameters near 1.

    No gate, norm or coefficient has its initial value.
    """
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        axis = next((FAN_IN_AXIS[name] for part in path if (name := getattr(part, "key", None)) in FAN_IN_AXIS), None)
        normal = rng.normal(size=leaf.shape)
        drawn = 1 + 0.3 * normal if axis is None else normal * leaf.shape[axis] ** -0.5
        return jnp.asarray(drawn, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)


def random_module(make: Callable[[], nnx.Module], seed: int = 0) -> Any:
    """The module that `make` returns, with random parameters."""
    graph, shapes = nnx.split(nnx.eval_shape(make), nnx.Param)
    return nnx.merge(graph, random_params(nnx.to_pure_dict(shapes), seed))
