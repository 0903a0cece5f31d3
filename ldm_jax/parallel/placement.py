"""Where arrays lie on a mesh: one table from a parameter's name to its axes."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ldm_jax.sharding import ALONG, Axis, partition

WIDTH, HEADS, HIDDEN, GROUPS, VOCABULARY = Axis.WIDTH, Axis.HEADS, Axis.HIDDEN, Axis.GROUPS, Axis.VOCABULARY

# By the end of a parameter's path. What is not here is small and whole on every device.
PARAMETER_AXES: dict[tuple[str, ...], tuple[Axis | None, ...]] = {
    ("embed", "embedding"): (VOCABULARY, WIDTH),
    ("head", "kernel"): (WIDTH, VOCABULARY),
    ("attention", "function", "query", "kernel"): (WIDTH, HEADS),
    ("attention", "function", "key", "kernel"): (WIDTH, HEADS),
    ("attention", "function", "value", "kernel"): (WIDTH, HEADS),
    ("attention", "function", "out", "kernel"): (HEADS, WIDTH),
    ("mlp", "function", "gate", "kernel"): (WIDTH, HIDDEN),
    ("mlp", "function", "up", "kernel"): (WIDTH, HIDDEN),
    ("mlp", "function", "out", "kernel"): (HIDDEN, WIDTH),
    ("latent", "kernel"): (WIDTH, None),
    ("reader", "query", "kernel"): (None, GROUPS),
    ("reader", "gate", "kernel"): (None, GROUPS),
    ("reader", "gate", "bias"): (GROUPS,),
    ("reader", "gain"): (GROUPS,),
    ("writer", "key", "kernel"): (None, GROUPS),
    ("writer", "importance", "kernel"): (None, GROUPS),
    ("writer", "importance", "bias"): (GROUPS,),
    ("forgetting", "theta"): (GROUPS,),
    ("mixer", "log_alpha"): (GROUPS,),
    ("mixer", "phi"): (WIDTH, None),
}


def parameter_axes(names: tuple[str, ...], rank: int) -> tuple[Axis | None, ...]:
    """The axes of a parameter; those of a stack of blocks have one before them."""
    own = next((axes for end, axes in PARAMETER_AXES.items() if names[-len(end) :] == end), ())
    return (None,) * (rank - len(own)) + own


def shardings(tree: Any, mesh: Mesh) -> Any:
    """For every array of a training state, or of anything that holds arrays by the names of parameters.

    Moments and averages lie where their parameters do.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = tuple(part.key for part in path if isinstance(getattr(part, "key", None), str))
        axes = parameter_axes(names, leaf.ndim) if leaf.ndim else ()
        return NamedSharding(mesh, partition(leaf.shape, axes, dict(mesh.shape)))

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(tuple(name.value for name in ALONG[Axis.BATCH])))
