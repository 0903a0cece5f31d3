"""What training would cost on TPUs that are not there: `python scripts/compile_check.py CONFIG --tpu v5e:16x16`."""

import dataclasses
import sys
from dataclasses import dataclass

import jax

from ldm_jax.config import MeshConfig
from ldm_jax.config.command_line import ConfigArguments, parse_over_config, run_script
from ldm_jax.config.toml import read_config
from ldm_jax.errors import UserError
from ldm_jax.roofline.compile import tpu_devices
from ldm_jax.roofline.costs import decode_costs, train_step_costs
from ldm_jax.roofline.text import check_and_print, parse_mesh, search_and_print


@dataclass(frozen=True)
class Arguments(ConfigArguments):
    """Compiles a config's training step for a pod and prints what a chip holds, computes, moves and sends in it.

    Every field of the config has a flag that overrides it. Exit status 0: it fits. 1: it does not, in the compiler's
    own words. It takes minutes, the first time.
    """

    tpu: str = "v5e:16x16"
    """A slice of a pod."""
    slices: int = 1
    """Such slices, joined by the data center's network; mesh.data is a multiple of them."""
    mesh: str | None = None
    """How the chips share the work, such as data=16,fsdp=16. None: the config's [mesh]."""
    decode: bool = False
    """Instead of the training step, the sampler's: the next token of train.batch_size sequences, their caches full."""
    search: bool = False
    """Rank all meshes by a rough count, compile the best six, and print those that fit."""


def main() -> None:
    """Parses, compiles and prints."""
    arguments = parse_over_config(Arguments, sys.argv[1:])
    config = arguments.config
    if arguments.slices < 1:
        raise UserError(f"slices is {arguments.slices}, but it must be at least 1.")
    overridden = config.mesh != read_config(arguments.config_file).mesh
    if arguments.search and (arguments.mesh is not None or overridden):
        raise UserError("search finds a mesh: leave --search or the mesh's flags out.")
    if arguments.mesh is not None and overridden:
        raise UserError("--mesh says all of a mesh: leave it or --mesh.data, --mesh.fsdp and so on out.")
    if arguments.search and arguments.decode:
        raise UserError("search ranks meshes for training: leave --search or --decode out.")
    if arguments.mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(arguments.mesh))
    if arguments.search:
        config = dataclasses.replace(config, mesh=MeshConfig())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for no device of ours cannot be read back
    devices = tpu_devices(arguments.tpu, arguments.slices)
    costs = decode_costs if arguments.decode else train_step_costs
    run = search_and_print if arguments.search else check_and_print
    sys.exit(0 if run(f"{arguments.config_file} on {arguments.tpu}", config, devices, costs) else 1)


if __name__ == "__main__":
    run_script(main)
