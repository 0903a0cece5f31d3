"""Rank the meshes of a pod by a rough estimate of the step time and of the memory."""

import dataclasses
import itertools
import math
from typing import NamedTuple

import jax

from ldm_jax.config import Config, MeshConfig
from ldm_jax.errors import UserError
from ldm_jax.nn import init_params
from ldm_jax.parallel import check_mesh
from ldm_jax.roofline.chips import ChipRates
from ldm_jax.sharding import MeshAxis
from ldm_jax.train.utilisation import model_flops_per_token

_OPTIMISER_BYTES = 64  # HBM bytes a step for each parameter of a chip, roughly: its update, gradient and norms


class Candidate(NamedTuple):
    """A mesh with its estimated costs."""

    mesh: MeshConfig
    seconds: float
    """Matmuls, the optimiser's HBM bytes and collectives, one after the other."""
    bytes: float
    """Memory of a chip."""


def ranked_meshes(config: Config, devices: int, rates: ChipRates, slices: int = 1) -> list[Candidate]:
    """All meshes that evenly divide the model and the batch: those that seem to fit, fastest first; then the others.

    The estimate counts matmuls; parameters gathered twice and reduced once over `fsdp`, gradients reduced over `data`
    and `context`, activations of every sublayer over `tensor`, keys and values over `context`; the HBM bytes of the
    parameters that a chip updates; in memory also the stream of every block and what the mixer saves.

    Raises:
        UserError: no mesh divides the model and the batch.
    """
    shapes = jax.tree.leaves(jax.eval_shape(lambda: init_params(config.model, config.mixer, 0)))
    parameters, flops = sum(math.prod(leaf.shape) for leaf in shapes), model_flops_per_token(config)
    found = [
        _estimate(config, MeshConfig(*sizes), rates, parameters, flops)
        for sizes in itertools.product(_divisors(devices), repeat=4)
        if math.prod(sizes) == devices and sizes[0] % slices == 0 and _divides(config, MeshConfig(*sizes))
    ]
    if not found:
        raise UserError(
            f"no mesh of {devices} chips evenly divides the model and a batch of {config.train.batch_size} windows: "
            "change train.batch_size."
        )
    fits = lambda each: each.bytes <= rates.hbm_capacity  # noqa: E731
    return sorted(found, key=lambda each: (not fits(each), each.seconds if fits(each) else each.bytes))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _divides(config: Config, mesh: MeshConfig) -> bool:
    try:
        check_mesh(config, dict(zip(MeshAxis, dataclasses.astuple(mesh), strict=True)))
    except UserError:
        return False
    return True


def _estimate(config: Config, mesh: MeshConfig, rates: ChipRates, parameters: int, flops: float) -> Candidate:
    model, item = config.model, config.model.dtype.itemsize
    data, fsdp, context, tensor = dataclasses.astuple(mesh)
    tokens = config.train.batch_size * config.data.context / (data * fsdp * context) / config.train.accumulation
    stream = tokens * model.width * item
    compute = flops * 4 / 3 * tokens / tensor * config.train.accumulation / rates.flops
    sent = 3 * item * parameters / tensor * (fsdp - 1) / fsdp  # two gathers and a reduce-scatter
    replicas = data * context  # each has gradients of all parameters of its part of fsdp and tensor
    sent += 2 * item * parameters / (tensor * fsdp) * (replicas - 1) / replicas
    sent += 12 * model.depth * stream * (tensor - 1) / tensor  # two sublayers: forward, recomputed, and twice backward
    kv_width = 2 * model.kv_heads_or_heads * model.head_dim_or_default / tensor
    sent += 3 * model.depth * tokens * context * kv_width * item * (context - 1) / context
    updating = _OPTIMISER_BYTES * parameters / (fsdp * tensor) / rates.hbm_rate
    memory = 16 * parameters / (fsdp * tensor)  # parameters, two moments and a gradient, float32
    memory += model.depth * stream + 12 * stream * model.mlp_width / model.width / tensor
    memory += 3 * 4 * tokens * min(1.0, model.loss_chunk / tokens) * model.vocabulary / tensor
    memory += 4 * config.mixer.options.training_numbers(model.sublayers) * tokens * model.width / tensor
    return Candidate(mesh, compute + updating + config.train.accumulation * sent / rates.ici_rate, memory)


def parse_mesh(text: str) -> MeshConfig:
    """The mesh of a text such as "data=16,fsdp=16". Raises UserError for other texts and sizes below 1."""
    names = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in names or name in sizes or not size.isdecimal():
            raise UserError(
                f'"{part}" in the mesh "{text}" is invalid: write one of {", ".join(names)}, each at most once, with a '
                "number, such as data=16,fsdp=16."
            )
        sizes[name] = int(size)
    try:
        return MeshConfig(**sizes)
    except ValueError as error:
        raise UserError(str(error)) from error
