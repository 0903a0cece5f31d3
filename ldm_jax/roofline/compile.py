"""Compile a gradient, a training step or a decoding step, for this machine or for an absent TPU. Nothing is run."""

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.infer.generation import DecodeState, token_step
from ldm_jax.infer.sampling import Sampling
from ldm_jax.nn import Params, init_params, model_declarations, model_graph
from ldm_jax.nn.cache import init_cache
from ldm_jax.parameters import shardings
from ldm_jax.sharding import Axis, batch_sharding, partition
from ldm_jax.train.step import make_train_step, state_shapes
from ldm_jax.typing import Scalar

# By default the TPU compiler prefetches operands into on-chip memory. Its count of bytes ignores in which memory an
# operand lies, so it would count each copy and each use of the copy as HBM bytes.
_NO_PREFETCH: dict[str, str | bool] = {"xla_vf_vmem_memory_space_assignment": False}

_EXAMPLES = "Examples of slices: v5e:2x2, v5p:2x2x1, v6e:16x16."

Chip = jax.sharding.SingleDeviceSharding
"""A single absent chip to compile for."""


class OutOfMemoryError(Exception):
    """The program needs more memory than the chip has. The message is the compiler's."""


def tpu_devices(topology: str, slices: int = 1) -> list[Any]:
    """The chips of one or several TPU slices such as v5e:2x2, to compile for. No TPU is needed.

    Raises:
        UserError: the TPU compiler is not installed, or it does not know the slice.
    """
    if re.fullmatch(r"\w+:\d+(x\d+)*", topology) is None:  # the compiler would choose a chip by itself for some
        raise UserError(f'"{topology}" is not a TPU slice. {_EXAMPLES}')
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not query the cloud's metadata server
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
            reason += ". The optional extra is missing: pip install -e '.[tpu]'"
        raise UserError(f'the TPU compiler cannot compile for "{topology}": {reason}. {_EXAMPLES}') from error


def tpu_chip(topology: str) -> Chip:
    """One chip of a TPU slice such as v5e:2x2. Raises UserError as `tpu_devices` does."""
    return Chip(tpu_devices(topology)[0])


def compile_gradient(config: Config, chip: Chip | None, *, count_hbm_bytes: bool = False) -> jax.stages.Compiled:
    """Loss and gradient of a batch: a training step without the optimiser, which is the same for every mixer.

    Args:
        config: the model, the mixer and the shape of a batch.
        chip: the TPU chip to compile for; None: this machine.
        count_hbm_bytes: keep all operands in HBM, so that the TPU compiler's "bytes accessed" are HBM bytes.

    Raises:
        OutOfMemoryError: the program does not fit the chip.
    """
    graph = model_graph(config.model, config.mixer)

    def loss(params: Params, windows: Any) -> Scalar:
        return nnx.merge(graph, params).loss(windows[:, :-1], windows[:, 1:])

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip)

    params = jax.tree.map(shape, jax.eval_shape(lambda: init_params(config.model, config.mixer, 0)))
    windows = shape(jnp.zeros((config.train.batch_size, config.data.context + 1), jnp.int32))
    options = _NO_PREFETCH if count_hbm_bytes and chip is not None else None
    return _compile(jax.jit(jax.value_and_grad(loss)).lower(params, windows), options)


def temporary_bytes(config: Config, chip: Chip | None) -> float | None:
    """Bytes that `compile_gradient` needs on one device beside arguments and results. None: it does not fit."""
    try:
        analysis: Any = compile_gradient(config, chip).memory_analysis()
    except OutOfMemoryError:
        return None
    return float(analysis.temp_size_in_bytes)


def cost_analysis(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's counts, such as "flops" and "bytes accessed". It counts the body of a loop once."""
    analysis: Any = compiled.cost_analysis()
    return analysis


def lower_train_step(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The training step on a mesh, ready to compile."""
    with jax.set_mesh(mesh):
        shapes = state_shapes(config)
        declarations = model_declarations(config.model, config.mixer)
        state = jax.tree.map(_with_sharding, shapes, shardings(shapes, mesh, declarations))
        rows = config.train.batch_size, config.data.context + 1
        tokens = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=batch_sharding(mesh))
        batch = Batch(tokens, tokens if config.data.separate_documents else None)  # pyright: ignore[reportArgumentType]
        return make_train_step(config, mesh).lower(state, batch)  # pyright: ignore[reportFunctionMemberAccess]


def lower_decode_step(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """One decoding step on a mesh: the next token of `train.batch_size` sequences with `data.context` cached tokens."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_params(config.model, config.mixer, 0))
        declarations = model_declarations(config.model, config.mixer)
        params = jax.tree.map(_with_sharding, shapes, shardings(shapes, mesh, declarations))
        step = token_step(model_graph(config.model, config.mixer))
        # The options are constants here, so that the compiler removes the sort, which the default options skip.
        default = jax.jit(lambda params, state: step(params, state, Sampling().values), donate_argnames="state")
        return default.lower(params, _decode_state(config, mesh))


def _decode_state(config: Config, mesh: Mesh) -> DecodeState:
    sequences, vocabulary = config.train.batch_size, config.model.vocabulary

    def make() -> DecodeState:
        cache = init_cache(config.model, jnp.zeros((sequences,), jnp.int32), config.data.context)
        scores = jnp.zeros((sequences, vocabulary))
        allowed = jnp.ones((1, vocabulary), bool)
        return DecodeState(cache, scores, scores > 0, allowed, jax.random.split(jax.random.key(0), sequences))

    def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = {
            5: (None, Axis.BATCH, None, Axis.HEADS, None),
            2: (Axis.BATCH, Axis.VOCABULARY),
            1: (Axis.BATCH,),
            0: (),
        }[len(shape.shape)]
        return _with_sharding(shape, NamedSharding(mesh, partition(shape.shape, axes, dict(mesh.shape))))

    return jax.tree.map(place, jax.eval_shape(make))


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def compile_and_partition(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """A program compiled for a TPU, and the HLO text of one device's part of it as the partitioner leaves it.

    That text has every collective once, before the compiler splits some of them to overlap them with matmuls.

    Raises:
        OutOfMemoryError: the program does not fit the chip.
        UserError: this version of the compiler does not write the partitioned program.
    """
    with tempfile.TemporaryDirectory() as directory:
        options = {"xla_dump_to": directory, "xla_dump_hlo_pass_re": ".*spmd.*", "xla_dump_hlo_as_text": True}
        compiled = _compile(lowered, options)
        dumps = sorted(Path(directory).glob("*spmd*.txt"))
        dumps = dumps or sorted(Path(directory).glob("*before_optimizations.txt"))  # a single device: no partitioner
        if not dumps:
            raise UserError(
                "this version of libtpu did not write the partitioned program: install the one in constraints.txt."
            )
        return compiled, dumps[-1].read_text()


def _compile(lowered: jax.stages.Lowered, options: dict[str, str | bool] | None) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error)[max(str(error).find("Ran out of memory"), 0) :]
        summary = re.split(r"\n\s*={5,}|\n\nLargest|Total hbm usage", text)[0]  # what follows lists the buffers
        raise OutOfMemoryError(summary.strip()[:2000]) from error
