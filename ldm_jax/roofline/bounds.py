"""What one chip of an absent TPU pod computes, moves and sends in a program, and the least time that takes."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ldm_jax.config import Config
from ldm_jax.errors import UserError
from ldm_jax.files import user_cache, write_atomically
from ldm_jax.parallel import make_mesh, slices_of
from ldm_jax.roofline import compile as compiler
from ldm_jax.roofline import counts, hlo
from ldm_jax.roofline.chips import ChipRates, chip_rates
from ldm_jax.train.utilisation import model_flops_per_token

BETWEEN_SLICES = " between slices"


@dataclass(frozen=True)
class ProgramCosts:
    """Of one chip in one run of a program. Where the program does not fit, all counts are 0."""

    chip: str
    """JAX's `device_kind`."""
    mesh: dict[str, int]
    slices: int
    out_of_memory: str | None
    """The compiler's message if the program does not fit."""
    argument_bytes: float = 0.0
    temporary_bytes: float = 0.0
    peak_bytes: float = 0.0
    matmul_flops: float = 0.0
    """As compiled: recomputed matmuls count again."""
    model_flops: float = 0.0
    """Without recomputation; see `model_flops_per_token`."""
    hbm_bytes: float = 0.0
    collective_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bytes sent, by kind of collective. The kinds of those between slices end in `BETWEEN_SLICES`."""

    @property
    def rates(self) -> ChipRates:
        """The published rates of the chip."""
        return chip_rates(self.chip)

    @property
    def sent_bytes(self) -> float:
        """Bytes sent in all collectives."""
        return sum(self.collective_bytes.values())

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that matmuls, HBM bytes and collectives take at the chip's published rates, each by itself.

        A step that overlapped them perfectly would take the longest of these.
        """
        dcn = sum(size for kind, size in self.collective_bytes.items() if kind.endswith(BETWEEN_SLICES))
        bounds = {
            "matmuls": self.matmul_flops / self.rates.flops,
            "HBM bytes": self.hbm_bytes / self.rates.hbm_rate,
            "collectives": (self.sent_bytes - dcn) / self.rates.ici_rate,
        }
        if dcn and self.rates.dcn_rate is not None:
            bounds["collectives" + BETWEEN_SLICES] = dcn / self.rates.dcn_rate
        return bounds

    @property
    def longest_bound(self) -> tuple[str, float]:
        """The name and the seconds of the longest of `bounds`."""
        return max(self.bounds.items(), key=lambda bound: bound[1])

    @property
    def utilisation_bound(self) -> float:
        """An upper bound of model flops utilisation."""
        return self.model_flops / self.rates.flops / self.longest_bound[1]


def train_step_costs(config: Config, devices: list[Any]) -> ProgramCosts:
    """Of the training step on TPU devices. Raises UserError if the config's mesh does not fit them or the model."""
    mesh = _full_mesh(config, devices)
    tokens_per_chip = config.train.batch_size * config.data.context / mesh.size
    lowered = compiler.lower_train_step(config, mesh)
    return _cached_costs(lowered, mesh, model_flops_per_token(config) * tokens_per_chip)


def decode_costs(config: Config, devices: list[Any]) -> ProgramCosts:
    """Of one decoding step: the next token of `train.batch_size` sequences with `data.context` cached tokens.

    The model flops leave attention out: with a single query it is mostly not compiled to matmuls.
    """
    mesh = _full_mesh(config, devices)
    sequences_per_chip = config.train.batch_size / mesh.size
    model = config.model
    attention = 4 * model.depth * model.heads * model.head_dim_or_default * config.data.context
    lowered = compiler.lower_decode_step(config, mesh)
    return _cached_costs(lowered, mesh, (model_flops_per_token(config) / 3 - attention) * sequences_per_chip)


def _full_mesh(config: Config, devices: list[Any]) -> Mesh:
    """The config's mesh, which must use all devices."""
    chip_rates(devices[0].device_kind)  # raises for an unknown chip before minutes of compilation
    mesh = make_mesh(config, devices)
    if mesh.size < len(devices):
        slices = slices_of(devices)
        raise UserError(
            f"the batch of {config.train.batch_size} windows uses {mesh.size} of {len(devices)} chips: raise "
            "train.batch_size, or mesh.fsdp, mesh.context or mesh.tensor"
            + (f"; mesh.data must be a multiple of the {slices} slices." if slices > 1 else ".")
        )
    return mesh


def _cached_costs(lowered: jax.stages.Lowered, mesh: Mesh, model_flops: float) -> ProgramCosts:
    """`_costs`, which takes minutes, read from the user's cache if it holds this program."""
    cache = _cache_file(lowered, mesh, model_flops)
    with contextlib.suppress(OSError, ValueError, TypeError):  # missing, or written by another version
        return ProgramCosts(**json.loads(cache.read_text()))
    costs = _costs(lowered, mesh, model_flops)
    with contextlib.suppress(OSError):  # without the file, the next call compiles again
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(dataclasses.asdict(costs)))
    return costs


def _cache_file(lowered: jax.stages.Lowered, mesh: Mesh, model_flops: float) -> Path:
    """Named by a hash of everything that the costs depend on."""
    versions = [importlib.metadata.version(name) for name in ("jaxlib", "libtpu")]
    flags = [os.environ.get(name) for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
    sources = [Path(file or "").read_text() for file in (__file__, compiler.__file__, counts.__file__, hlo.__file__)]
    chips = [(device.device_kind, str(device)) for device in mesh.devices.flat]
    text = repr((versions, flags, sources, chips, model_flops, lowered.as_text()))
    return user_cache() / "roofline" / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def _costs(lowered: jax.stages.Lowered, mesh: Mesh, model_flops: float) -> ProgramCosts:
    devices = list(mesh.devices.flat)
    slices = slices_of(devices)
    where = devices[0].device_kind, {str(name): size for name, size in mesh.shape.items()}, slices
    try:
        compiled, partitioned_text = compiler.compile_and_partition(lowered)
    except compiler.OutOfMemoryError as error:
        return ProgramCosts(*where, out_of_memory=str(error))
    analysis: Any = compiled.memory_analysis()
    program, partitioned = hlo.parse_program(compiled.as_text() or ""), hlo.parse_program(partitioned_text)
    collective_bytes: defaultdict[str, float] = defaultdict(float)
    for collective in counts.collectives(partitioned, len(devices) // slices, program):
        collective_bytes[collective.kind + BETWEEN_SLICES * collective.spans_slices] += collective.sent
    return ProgramCosts(
        *where,
        out_of_memory=None,
        argument_bytes=float(analysis.argument_size_in_bytes),
        temporary_bytes=float(analysis.temp_size_in_bytes),
        peak_bytes=float(analysis.peak_memory_in_bytes),
        matmul_flops=counts.matmul_flops(partitioned),
        model_flops=model_flops,
        hbm_bytes=counts.hbm_bytes(program),
        collective_bytes=dict(collective_bytes),
    )
