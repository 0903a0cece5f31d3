"""Sharding: which axes of arrays lie along which axes of the mesh of devices. Without a mesh it has no effect.

The mesh is the one that `jax.set_mesh` has set. Its axes are those of `MeshAxis`; a model names only `Axis`.
"""

import enum
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped


class MeshAxis(enum.StrEnum):
    """The axes of a mesh, from the slowest connections to the fastest."""

    DATA = "data"
    FSDP = "fsdp"
    CONTEXT = "context"
    TENSOR = "tensor"


class Axis(enum.StrEnum):
    """What an axis of an activation or a parameter is."""

    BATCH = "batch"
    TOKENS = "tokens"
    HEADS = "heads"
    HIDDEN = "hidden"
    GROUPS = "groups"
    VOCABULARY = "vocabulary"
    WIDTH = "width"
    """Of a parameter; an activation's width is whole on every device."""


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
    """The array, laid out over the mesh by its axes; None is an axis that is whole on every device.

    So is one that the devices do not divide, such as the single token of a decoding step.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(x.shape, axes, dict(mesh.shape)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """That of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(tuple(name.value for name in ALONG[Axis.BATCH])))


def parts(shape: tuple[int, ...], *axes: Axis | None) -> int:
    """How many parts the mesh in use cuts an array into; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return 1
    names = jax.tree.leaves(tuple(partition(shape, axes, dict(mesh.shape))))
    return math.prod(mesh.shape[name] for name in names)


def partition(shape: tuple[int, ...], axes: tuple[Axis | None, ...], mesh: dict[str, int]) -> PartitionSpec:
    """The axes of the mesh for each axis of a shape; None where they do not divide it.

    Raises:
        ValueError: not as many axes as the shape has; two that lie along one axis of the mesh.
    """
    if len(shape) != len(axes):
        raise ValueError(f"axes {axes} are {len(axes)}, but the array's shape is {shape}.")
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
