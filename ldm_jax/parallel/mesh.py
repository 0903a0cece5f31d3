"""The mesh of devices."""

import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from ldm_jax.axes import ALONG, Axis, MeshAxis
from ldm_jax.config import Config
from ldm_jax.errors import UserError
from ldm_jax.mixers import MixerKind


def make_mesh(config: Config) -> Mesh:
    """The mesh of a config over all devices; the fastest connections are within `tensor`.

    Raises:
        UserError: the numbers of devices do not fit, or do not divide what they are to share.
    """
    devices = jax.devices()
    try:
        sizes = config.mesh.sizes(len(devices))
    except ValueError as error:
        raise UserError(f"{error} Change [mesh].") from error
    check_mesh(config, sizes)
    grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(name.value for name in sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_mesh(config: Config, sizes: dict[MeshAxis, int]) -> None:
    """Raises UserError unless the axes of the mesh divide what lies along them."""
    model = config.model
    part = config.train.batch_size // config.train.accumulation
    shared = [
        (Axis.BATCH, "train.batch_size / train.accumulation", part),
        (Axis.TOKENS, "data.context", config.data.context),
        (Axis.HEADS, "model.heads", model.heads),
        (Axis.HEADS, "model.kv_heads", model.kv_heads_or_heads),
        (Axis.HIDDEN, "model.mlp_width", model.mlp_width),
        (Axis.VOCABULARY, "model.vocabulary", model.vocabulary),
        (Axis.WIDTH, "model.width", model.width),
    ]
    if config.mixer.kind is MixerKind.LDM:
        shared.append((Axis.GROUPS, "mixer.ldm.groups", config.mixer.ldm.groups))
    for axis, name, size in shared:
        parts = math.prod(sizes[along] for along in ALONG[axis])
        if size % parts:
            along = " x ".join(f"mesh.{name}" for name in ALONG[axis])
            raise UserError(f"{name} is {size}, which {along} = {parts} does not divide: change one of them.")
