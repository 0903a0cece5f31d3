"""The mesh of devices."""

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
    """The mesh of a config; the fastest connections are within `tensor`, the slowest, between slices, within `data`.

    Where `mesh.data` is left out, it is the most that divides the batch: some devices may stay idle.

    Args:
        config: its `[mesh]`, and what that is to divide.
        devices: None: all there are.

    Raises:
        UserError: the numbers of devices do not fit, or do not divide what they are to share; several processes of
            which some would be idle.
    """
    devices = jax.devices() if devices is None else devices
    try:
        sizes = config.mesh.sizes(len(devices), config.train.batch_size // config.train.accumulation)
    except ValueError as error:
        raise UserError(f"{error} Change [mesh].") from error
    check_mesh(config, sizes)
    used = math.prod(sizes.values())
    if used < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"train.batch_size {config.train.batch_size} in {config.train.accumulation} parts leaves {used} of "
            f"{len(devices)} devices something to do, but all of several processes have to be used: change one of them."
        )
    return Mesh(
        _arranged(tuple(sizes.values()), devices[:used]),
        tuple(name.value for name in sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def slices_of(devices: Sequence[Any]) -> int:
    """How many slices of TPUs, with a network of their own each, the devices are of; 1 for other devices."""
    return len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}) or 1


def _arranged(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    slices = slices_of(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, *others = shape
    if data % slices:
        raise UserError(
            f"mesh.data is {data}, but the devices are of {slices} slices, between which only data is shared: make it "
            f"a multiple of {slices}."
        )
    own = (data // slices, *others)
    across = (slices, *(1 for _ in others))
    return mesh_utils.create_hybrid_device_mesh(own, across, devices, allow_split_physical_axes=True)


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
    for name, (axis, size) in config.mixer.options.sharded_sizes.items():
        shared.append((axis, f"mixer.{config.mixer.kind}.{name}", size))
    for axis, name, size in shared:
        parts = math.prod(sizes[along] for along in ALONG[axis])
        if size % parts:
            along = " x ".join(f"mesh.{each}" for each in ALONG[axis])
            raise UserError(f"{name} is {size}, which {along} = {parts} does not divide: change one of them.")
    if model.attention is AttentionImplementation.CUDNN and sizes[MeshAxis.CONTEXT] > 1:
        raise UserError(
            f"mesh.context is {sizes[MeshAxis.CONTEXT]}, but model.attention cudnn needs whole windows: take xla."
        )
    part = config.data.context // sizes[MeshAxis.CONTEXT]
    if model.attention is AttentionImplementation.FLASH and part % TILE:
        raise UserError(
            f"a device has {part} tokens of a window (data.context / mesh.context), but model.attention flash takes "
            f"multiples of {TILE}: change one of them, or take xla."
        )
