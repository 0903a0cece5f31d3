"""A training step's gradient, compiled and not run: for this machine, or for a TPU that is not there."""

import importlib.util
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ldm_jax.config import Config
from ldm_jax.errors import UserError
from ldm_jax.nn import Params, init_params, model_graph
from ldm_jax.typing import Scalar

# Without this the TPU compiler prefetches what it can into on-chip memory, and its count of bytes, which takes no note
# of where an operand lies, counts those copies and their uses as traffic with the main memory (HBM), too.
_NO_PREFETCH: dict[str, str | bool] = {"xla_vf_vmem_memory_space_assignment": False}

_EXAMPLES = "Slices are such as v5e:2x2, v5p:2x2x1 or v6e:16x16."

Chip = jax.sharding.SingleDeviceSharding
"""What a program is compiled for that is not for this machine."""


def tpu_devices(topology: str, slices: int = 1) -> list[Any]:
    """The chips of a TPU slice such as v5e:2x2, or of several; nothing can be run on them, and no TPU is needed.

    Raises:
        UserError: the TPU compiler is not installed, or it does not know the slice.
    """
    if re.fullmatch(r"\w+:\d+(x\d+)*", topology) is None:  # of which the compiler may make a chip of its own choice
        raise UserError(f'"{topology}" is no slice of TPUs. {_EXAMPLES}')
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no cloud what this machine is
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    several = {} if slices == 1 else {"num_slices": slices}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **several).devices)
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        if importlib.util.find_spec("libtpu") is None:
            reason += ". It needs the optional extra, pip install -e '.[tpu]'"
        raise UserError(f'the TPU compiler cannot compile for "{topology}": {reason}. {_EXAMPLES}') from error


def tpu_chip(topology: str) -> Chip:
    """One chip of a TPU slice such as v5e:2x2. Raises UserError as `tpu_devices`."""
    return Chip(tpu_devices(topology)[0])


def compile_gradient(config: Config, chip: Chip | None, *, count_traffic: bool = False) -> jax.stages.Compiled:
    """Loss and gradient of a batch, compiled: a training step without the optimiser, which is the same for every mixer.

    For a TPU chip, or for this machine (None). With `count_traffic` all operands stay in the main memory, so that the
    compiler's "bytes accessed" is the traffic with it.
    """
    graph = model_graph(config.model, config.mixer)

    def loss(params: Params, windows: Any) -> Scalar:
        return nnx.merge(graph, params).loss(windows[:, :-1], windows[:, 1:])

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip)

    params = jax.tree.map(shape, jax.eval_shape(lambda: init_params(config.model, config.mixer, 0)))
    windows = shape(jnp.zeros((config.train.batch_size, config.data.context + 1), jnp.int32))
    options = _NO_PREFETCH if count_traffic and chip is not None else None
    return jax.jit(jax.value_and_grad(loss)).lower(params, windows).compile(compiler_options=options)


def temporary_bytes(config: Config, chip: Chip | None) -> float | None:
    """What `compile_gradient` needs beside its arguments and results, bytes on one device; None if it does not fit."""
    try:
        analysis: Any = compile_gradient(config, chip).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    return float(analysis.temp_size_in_bytes)


def costs(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's counts: "flops", "bytes accessed". A loop's body counts once."""
    analysis: Any = compiled.cost_analysis()
    return analysis
