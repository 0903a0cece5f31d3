"""A program of this library compiled for a pod that is not there, and what it would cost on it."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.files import user_cache, write_atomically
from ldm_jax.infer.generation import DecodeState, token_step
from ldm_jax.infer.sampling import Sampling
from ldm_jax.nn import init_params, model_declarations, model_graph
from ldm_jax.nn.cache import init_cache
from ldm_jax.parallel import make_mesh, slices_of
from ldm_jax.parameters import shardings
from ldm_jax.roofline import counts, hlo
from ldm_jax.roofline.chips import ChipRates, chip_rates
from ldm_jax.sharding import Axis, batch_sharding, partition
from ldm_jax.train.step import make_train_step, state_shapes
from ldm_jax.train.utilisation import model_flops_per_token

PARTITIONED = ".*spmd.*"
"""Passes of the compiler after which it is to write the program down: the last one has all operations among devices,
and none of the TPU's own ways to overlap them, which would count some twice."""


BETWEEN = " between slices"


@dataclass(frozen=True)
class PodCosts:
    """What one chip of a pod has to do in a run of a program. All but `refusal` is 0 where it does not fit."""

    kind: str
    """Of the chips."""
    mesh: dict[str, int]
    slices: int
    refusal: str | None
    """The compiler's own words where a chip's memory is not enough."""
    argument_bytes: float = 0.0
    temporary_bytes: float = 0.0
    peak_bytes: float = 0.0
    flops: float = 0.0
    """Of products, as compiled: what is computed again counts again."""
    model_flops: float = 0.0
    """Of products, without what is computed again; see `model_flops_per_token`."""
    hbm_bytes: float = 0.0
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Over the network, by the kind of operation among devices; with `BETWEEN` added of those in several slices."""

    @property
    def rates(self) -> ChipRates:
        """Of its chips."""
        return chip_rates(self.kind)

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that the step takes at least for its products, its memory traffic and its messages, each by itself.

        Chips that did all three at once, each at its published rate, would need the longest of them.
        """
        outer = sum(sent for kind, sent in self.sent_bytes.items() if kind.endswith(BETWEEN))
        inner = sum(self.sent_bytes.values()) - outer
        bounds = {
            "compute": self.flops / self.rates.flops,
            "memory": self.hbm_bytes / self.rates.hbm_rate,
            "network": inner / self.rates.link_rate,
        }
        if outer and self.rates.outer_rate is not None:
            bounds["network between slices"] = outer / self.rates.outer_rate
        return bounds

    @property
    def utilisation_bound(self) -> float:
        """The most that model flops a second can be, over the chip's peak."""
        return self.model_flops / self.rates.flops / max(self.bounds.values())


def train_step_costs(config: Config, devices: list[Any]) -> PodCosts:
    """Of the real training step, compiled for the devices under the config's mesh.

    Raises:
        UserError: the mesh does not fit the devices or the model.
    """
    mesh = _mesh_of_all(config, devices)
    with jax.set_mesh(mesh):
        shapes = state_shapes(config)
        state = jax.tree.map(_placed, shapes, shardings(shapes, mesh, model_declarations(config.model, config.mixer)))
        rows = config.train.batch_size, config.data.context + 1
        tokens = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=batch_sharding(mesh))
        batch = Batch(tokens, tokens if config.data.separate_documents else None)  # pyright: ignore[reportArgumentType]
        lowered = make_train_step(config, mesh).lower(state, batch)  # pyright: ignore[reportFunctionMemberAccess]
    tokens_of_chip = config.train.batch_size * config.data.context / mesh.size
    return _costs(lowered, mesh, model_flops_per_token(config) * tokens_of_chip)


def decode_costs(config: Config, devices: list[Any]) -> PodCosts:
    """Of the sampler's step: the next token of `train.batch_size` sequences, with a full cache of `data.context`.

    The model's flops are those with parameters; attention of a single query is work on vectors for the most part.
    """
    mesh = _mesh_of_all(config, devices)
    graph = model_graph(config.model, config.mixer)
    with jax.set_mesh(mesh):
        params = jax.eval_shape(lambda: init_params(config.model, config.mixer, 0))
        placed = jax.tree.map(_placed, params, shardings(params, mesh, model_declarations(config.model, config.mixer)))
        state = _decode_state(config, mesh)
        lowered = token_step(graph, Sampling()).lower(placed, state)  # pyright: ignore[reportFunctionMemberAccess]
    sequences = config.train.batch_size / mesh.size
    attention = 4 * config.model.depth * config.model.width * config.data.context  # of single queries: vectors' work
    return _costs(lowered, mesh, (model_flops_per_token(config) / 3 - attention) * sequences)


def _mesh_of_all(config: Config, devices: list[Any]) -> Mesh:
    chip_rates(devices[0].device_kind)  # before minutes are spent
    mesh = make_mesh(config, devices)
    if mesh.size < len(devices):
        slices = slices_of(devices)
        raise UserError(
            f"the batch keeps {mesh.size} of {len(devices)} chips busy: raise train.batch_size, or share more by "
            "fsdp, context or tensor" + (f"; data is to be a multiple of the {slices} slices." if slices > 1 else ".")
        )
    return mesh


def _decode_state(config: Config, mesh: Mesh) -> DecodeState:
    """Its shapes, sequences and heads laid over the mesh."""
    sequences, vocabulary = config.train.batch_size, config.model.vocabulary

    def make() -> DecodeState:
        cache = init_cache(config.model, jnp.zeros((sequences,), jnp.int32), config.data.context)
        scores = jnp.zeros((sequences, vocabulary))
        return DecodeState(cache, scores, scores > 0, jax.random.split(jax.random.key(0), sequences))

    def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = {
            5: (None, Axis.BATCH, None, Axis.HEADS, None),
            2: (Axis.BATCH, Axis.VOCABULARY),
            1: (Axis.BATCH,),
            0: (),
        }[len(shape.shape)]
        return _placed(shape, NamedSharding(mesh, partition(shape.shape, axes, dict(mesh.shape))))

    return jax.tree.map(place, jax.eval_shape(make))


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _costs(lowered: jax.stages.Lowered, mesh: Mesh, model_flops: float) -> PodCosts:
    devices = list(mesh.devices.flat)
    slices = slices_of(devices)
    kept = _kept(lowered, devices, model_flops)
    with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or none of this version
        return PodCosts(**json.loads(kept.read_text()))
    where = devices[0].device_kind, {str(name): size for name, size in mesh.shape.items()}, slices
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": PARTITIONED, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _keep(PodCosts(*where, refusal=_own_words(str(error))), kept)
        partitioned = _partitioned(Path(folder))
    analysis: Any = compiled.memory_analysis()
    program = hlo.parse_program(compiled.as_text() or "")
    sent: defaultdict[str, float] = defaultdict(float)
    for each in counts.collectives(partitioned, len(devices) // slices, program):
        sent[each.kind + BETWEEN * each.spans_slices] += each.sent
    costs = PodCosts(
        *where,
        refusal=None,
        argument_bytes=float(analysis.argument_size_in_bytes),
        temporary_bytes=float(analysis.temp_size_in_bytes),
        peak_bytes=float(analysis.peak_memory_in_bytes),
        flops=counts.product_flops(partitioned),
        model_flops=model_flops,
        hbm_bytes=counts.hbm_bytes(program),
        sent_bytes=dict(sent),
    )
    return _keep(costs, kept)


def _kept(lowered: jax.stages.Lowered, devices: list[Any], model_flops: float) -> Path:
    """The file for the costs of a program: its name is a hash of all that they depend on."""
    flags = [os.environ.get(name) for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
    compiler = importlib.metadata.version("jaxlib"), importlib.metadata.version("libtpu"), flags
    counted = model_flops, [Path(file or "").read_text() for file in (__file__, hlo.__file__, counts.__file__)]
    chips = [(device.device_kind, str(device)) for device in devices]
    text = repr((compiler, counted, chips, lowered.as_text()))
    return user_cache() / "pods" / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def _keep(costs: PodCosts, file: Path) -> PodCosts:
    with contextlib.suppress(OSError):  # without room for it, the next time takes as long
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(dataclasses.asdict(costs)))
    return costs


def _partitioned(folder: Path) -> hlo.Program:
    """The program of one device, as the partitioner left it; on one device, as it was given to the compiler."""
    written = sorted(folder.glob("*spmd*.txt")) or sorted(folder.glob("*before_optimizations.txt"))
    if not written:
        raise UserError(
            "the TPU compiler did not write down the partitioned program: this version of libtpu is not one that "
            "compile_check.py knows; take that of constraints.txt."
        )
    return hlo.parse_program(written[-1].read_text())


def _own_words(error: str) -> str:
    """What the compiler says of memory, up to its list of the largest buffers' details."""
    start = error.find("Ran out of memory")
    text = error[max(start, 0) :]
    return re.split(r"\n\s*={5,}|\n\nLargest|Total hbm usage", text)[0].strip()[:2000]
