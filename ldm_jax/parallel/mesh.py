"""The device mesh of a config."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from ldm_jax.config import AttentionImplementation, Config
from ldm_jax.errors import UserError
from ldm_jax.nn.softmax_attention import TILE
from ldm_jax.sharding import ALONG, Axis, MeshAxis


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a config on these devices; None: on all.

    `tensor` gets the fastest links between devices, and `data` the slowest, those between slices. If `mesh.data` is
    None, it becomes the largest size that divides the batch; some devices may then stay idle.

    Raises:
        UserError: the mesh does not fit the devices, or does not divide a size that it shards, or a job of several
            processes would leave devices idle.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    check_mesh(config, sizes)
    used = math.prod(sizes.values())
    if used < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"train.batch_size {config.train.batch_size} with train.accumulation {config.train.accumulation} uses only "
            f"{used} of {len(devices)} devices, but a job of several processes must use all: change one of them."
        )
    return Mesh(
        _arranged(tuple(sizes.values()), devices[:used]),
        tuple(name.value for name in sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def mesh_sizes(config: Config, devices: int) -> dict[MeshAxis, int]:
    """The size of each mesh axis on so many devices. Raises UserError if `[mesh]` does not fit them."""
    try:
        return config.mesh.sizes(devices, config.train.batch_size // config.train.accumulation)
    except ValueError as error:
        raise UserError(f"{error} Change [mesh].") from error


def slices_of(devices: Sequence[Any]) -> int:
    """The number of TPU slices that the devices belong to; 1 for other devices."""
    return len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}) or 1


def _arranged(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    slices = slices_of(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, *others = shape
    if data % slices:
        raise UserError(
            f"mesh.data is {data}, but it must be a multiple of the number of slices, {slices}: only the axis data "
            "spans several slices."
        )
    own = (data // slices, *others)
    across = (slices, *(1 for _ in others))
    return mesh_utils.create_hybrid_device_mesh(own, across, devices, allow_split_physical_axes=True)


def check_mesh(config: Config, sizes: dict[MeshAxis, int]) -> None:
    """Raises UserError unless each mesh axis evenly divides the dimensions that it shards."""
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
    for name, (axis, size) in config.mixer.options.sharded_sizes.items():
        shared.append((axis, f"mixer.{config.mixer.kind}.{name}", size))
    for axis, name, size in shared:
        parts = math.prod(sizes[along] for along in ALONG[axis])
        if size % parts:
            along = " x ".join(f"mesh.{each}" for each in ALONG[axis])
            raise UserError(f"{name} is {size}, which {along} = {parts} does not divide: change one of them.")
    if model.attention is AttentionImplementation.CUDNN and sizes[MeshAxis.CONTEXT] > 1:
        raise UserError(
            f"mesh.context is {sizes[MeshAxis.CONTEXT]}, but model.attention cudnn needs whole windows: set it to xla."
        )
    part = config.data.context // sizes[MeshAxis.CONTEXT]
    if model.attention is AttentionImplementation.FLASH and part % TILE:
        raise UserError(
            f"a device has {part} tokens of a window (data.context / mesh.context), but model.attention flash needs "
            f"a multiple of {TILE}: change one of them, or set model.attention to xla."
        )
