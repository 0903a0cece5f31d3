"""Estimate the cost of training on absent TPUs: `python scripts/compile_check.py CONFIG --tpu v5e:16x16`."""

import dataclasses
import sys
from dataclasses import dataclass

import interruptible  # noqa: F401 (first)
import jax

from ldm_jax.config import MeshConfig
from ldm_jax.config.command_line import ConfigArguments, parse_over_config, run_script
from ldm_jax.config.toml import read_config
from ldm_jax.errors import UserError
from ldm_jax.roofline.bounds import decode_costs, train_step_costs
from ldm_jax.roofline.compile import tpu_devices
from ldm_jax.roofline.mesh_search import parse_mesh
from ldm_jax.roofline.text import print_costs, print_search


@dataclass(frozen=True)
class Arguments(ConfigArguments):
    """Compiles a config's training step for a TPU pod and prints one chip's memory, matmuls, HBM bytes and collectives.

    Every field of the config has a flag that overrides it. Exit status: 0 if the program fits the chips, 1 if not. The
    first compilation of a program takes minutes.
    """

    tpu: str = "v5e:16x16"
    """TPU slice, such as v5e:2x2."""
    slices: int = 1
    """Number of such slices, joined by the data-center network. mesh.data must be a multiple of it."""
    mesh: str | None = None
    """Mesh, such as data=16,fsdp=16. None: the config's [mesh]."""
    decode: bool = False
    """Compile one decoding step, for train.batch_size sequences with full caches, instead of the training step."""
    search: bool = False
    """Rank all meshes by an estimate, compile the best six, and print those that fit."""


def main() -> None:
    """Parses, compiles and prints."""
    arguments = parse_over_config(Arguments, sys.argv[1:])
    config = arguments.config
    if arguments.slices < 1:
        raise UserError(f"slices is {arguments.slices}, but it must be at least 1.")
    overridden = config.mesh != read_config(arguments.config_file).mesh
    if arguments.search and (arguments.mesh is not None or overridden):
        raise UserError("--search chooses the mesh: omit --search, or omit --mesh and the --mesh.* flags.")
    if arguments.mesh is not None and overridden:
        raise UserError("--mesh sets the whole mesh: omit --mesh, or omit the --mesh.* flags.")
    if arguments.search and arguments.decode:
        raise UserError("--search ranks meshes for training only: omit --search or --decode.")
    if arguments.mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(arguments.mesh))
    if arguments.search:
        config = dataclasses.replace(config, mesh=MeshConfig())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # JAX cannot read back programs for absent devices
    devices = tpu_devices(arguments.tpu, arguments.slices)
    costs = decode_costs if arguments.decode else train_step_costs
    run = print_search if arguments.search else print_costs
    sys.exit(0 if run(f"{arguments.config_file} on {arguments.tpu}", config, devices, costs) else 1)


if __name__ == "__main__":
    run_script(main)
