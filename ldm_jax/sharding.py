"""Sharding: maps the axes of arrays to the axes of the mesh. Without a mesh it has no effect.

The mesh is the one set by `jax.set_mesh`; its axes are `MeshAxis`. Models refer only to `Axis`.
"""

import enum
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped


class MeshAxis(enum.StrEnum):
    """The axes of a mesh, ordered from the slowest interconnect to the fastest."""

    DATA = "data"
    FSDP = "fsdp"
    CONTEXT = "context"
    TENSOR = "tensor"


class Axis(enum.StrEnum):
    """The role of an axis of an activation or a parameter."""

    BATCH = "batch"
    TOKENS = "tokens"
    HEADS = "heads"
    HIDDEN = "hidden"
    GROUPS = "groups"
    VOCABULARY = "vocabulary"
    WIDTH = "width"
    """The width axis of a parameter. The width axis of an activation is not sharded."""


ALONG: dict[Axis, tuple[MeshAxis, ...]] = {
    Axis.BATCH: (MeshAxis.DATA, MeshAxis.FSDP),
    Axis.TOKENS: (MeshAxis.CONTEXT,),
    Axis.HEADS: (MeshAxis.TENSOR,),
    Axis.HIDDEN: (MeshAxis.TENSOR,),
    Axis.GROUPS: (MeshAxis.TENSOR,),
    Axis.VOCABULARY: (MeshAxis.TENSOR,),
    Axis.WIDTH: (MeshAxis.FSDP,),
}


def constrain(x: Shaped[Array, "..."], *axes: Axis | None) -> Shaped[Array, "..."]:
    """Constrains the sharding of an array by the roles of its axes.

    An axis is replicated if its role is None, or if the mesh does not evenly divide it (the single token of a decoding
    step, for example).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(x.shape, axes, dict(mesh.shape)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch, whose first axis is `Axis.BATCH`."""
    return NamedSharding(mesh, PartitionSpec(tuple(name.value for name in ALONG[Axis.BATCH])))


def parts(shape: tuple[int, ...], *axes: Axis | None) -> int:
    """The number of shards of an array on the current mesh; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return 1
    names = jax.tree.leaves(tuple(partition(shape, axes, dict(mesh.shape))))
    return math.prod(mesh.shape[name] for name in names)


def partition(shape: tuple[int, ...], axes: tuple[Axis | None, ...], mesh: dict[str, int]) -> PartitionSpec:
    """The partition spec of an array: the mesh axes of each of its axes, or None if they do not evenly divide it.

    Raises:
        ValueError: the number of axes differs from the array's rank, or two axes map to the same mesh axis.
    """
    if len(shape) != len(axes):
        raise ValueError(f"axes is {axes}, of length {len(axes)}, but the array has shape {shape}: pass one per axis.")
    users: dict[MeshAxis, Axis] = {}
    along = []
    for size, axis in zip(shape, axes, strict=True):
        if axis is None:
            along.append(None)
            continue
        for name in ALONG[axis]:
            if (other := users.setdefault(name, axis)) is not axis or axes.count(axis) > 1:
                raise ValueError(f"{other} and {axis} of one array both lie along the mesh's {name}: only one can.")
        names = [name.value for name in ALONG[axis] if mesh[name] > 1]
        divides = size % math.prod(mesh[name] for name in names) == 0
        along.append(None if not names or not divides else names[0] if len(names) == 1 else tuple(names))
    return PartitionSpec(*along)
