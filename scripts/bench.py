"""What a depth memory costs, how fast data is read and text generated: `python scripts/bench.py memory`, or step."""

import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
import tyro

from ldm_jax.bench import training as bench
from ldm_jax.bench.generation import generation_rows
from ldm_jax.bench.loader import loader_rows
from ldm_jax.bench.table import plot_memory, print_rows, write_rows
from ldm_jax.config import ComputeType
from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.config.toml import read_config
from ldm_jax.errors import UserError
from ldm_jax.memory import Backward
from ldm_jax.mixers import Form
from ldm_jax.roofline.compile import tpu_chip

T = TypeVar("T")
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"


class What(enum.StrEnum):
    """What is measured."""

    MEMORY = "memory"
    TRAFFIC = "traffic"
    STEP = "step"
    COMPILE = "compile"
    WRITE = "write"
    LOADER = "loader"
    GENERATE = "generate"


TITLES = {
    What.MEMORY: "Temporary memory of loss and gradient, compiled",
    What.TRAFFIC: "Main memory traffic and flops of loss and gradient, per block; attention is a token-local stand-in",
    What.STEP: "Seconds of a training step, the mixers taking turns, median",
    What.COMPILE: "Seconds to trace and compile loss and gradient, the depths taking turns, median",
    What.WRITE: "Seconds of one write, and of one copy of the same bytes, median",
    What.LOADER: "Tokens a second that the loader reads, and that the training step takes, taking turns, median",
    What.GENERATE: "Tokens a second that are generated, with and without a cache, taking turns, median",
}


@dataclass(frozen=True)
class Arguments:
    """Measures LDM beside PreLN, prints a table, and writes the figures as JSON if asked to."""

    what: tyro.conf.Positional[What]
    """memory: compiled temporary memory. traffic: bytes and flops per block on a TPU chip. step: seconds of a training
    step. compile: seconds to compile. write: one write against a copy of its bytes. loader: reading a
    config's data against training on it. generate: decoding with a config's model."""
    json: Path | None = None
    """File for the figures."""
    plot: Path | None = None
    """Picture of memory against depth (memory)."""
    tpu: str | None = None
    """A TPU slice such as v5e:2x2, for a chip of which memory and traffic are compiled; no TPU is needed."""
    key_dims: tuple[int, ...] | None = None
    """K. None: 4 and 16, for a TPU 8."""
    modes: tuple[Backward, ...] | None = None
    """What the backward pass has. None: all three."""
    forms: tuple[Form, ...] | None = None
    """Forms of the memory. None: all; fused, whose kernel is for TPUs, with --tpu only."""
    dtypes: tuple[ComputeType, ...] | None = None
    """Compute types (traffic). None: both."""
    depths: tuple[int, ...] | None = None
    """Blocks (memory; the slope is between the last two). None: 6, 12 and 24, for a TPU 24."""
    step_depth: int = 4
    """Blocks (step)."""
    repetitions: int | None = None
    """Rounds (step, compile, write, loader, generate). None: 10, of compile 2."""
    config: Path | None = None
    """Config whose data or model is used (loader, generate). None: configs/quickstart.toml."""


def check(arguments: Arguments) -> None:
    """Raises UserError for numbers and combinations that measure nothing."""
    if arguments.what is What.TRAFFIC and arguments.tpu is None:
        raise UserError("traffic is counted by the TPU compiler: add --tpu v5e:2x2 (pip install -e '.[tpu]').")
    if arguments.tpu is not None and arguments.what not in (What.MEMORY, What.TRAFFIC):
        raise UserError(f"{arguments.what} is measured on this machine: leave --tpu out.")
    if arguments.plot is not None and (arguments.what is not What.MEMORY or arguments.tpu is not None):
        raise UserError("the picture is one of memory on this machine: leave --plot out.")
    if arguments.tpu is None and Form.FUSED in (arguments.forms or ()):
        raise UserError("the form fused is for TPUs: leave it out of --forms, or add --tpu v5e:2x2.")
    here = What.MEMORY, What.TRAFFIC, What.STEP, What.COMPILE
    for name, measured in (
        ("depths", (What.MEMORY,)),
        ("dtypes", (What.TRAFFIC,)),
        ("modes", here),
        ("forms", here),
        ("config", (What.LOADER, What.GENERATE)),
    ):
        if getattr(arguments, name) is not None and arguments.what not in measured:
            raise UserError(f"{arguments.what} takes no {name}: leave --{name} out.")
    for name in ("key_dims", "modes", "forms", "dtypes", "depths"):
        if getattr(arguments, name) == ():
            raise UserError(f"--{name.replace('_', '-')} is empty: name some, or leave it out.")
    depths = arguments.depths or (1,)
    if min(depths) < 1 or list(depths) != sorted(set(depths)):
        raise UserError(f"depths are {depths}, but they must be at least 1 and rise.")
    for name, values in (
        ("key_dims", arguments.key_dims or (1,)),
        ("step_depth", (arguments.step_depth,)),
        ("repetitions", (1 if arguments.repetitions is None else arguments.repetitions,)),
    ):
        if min(values) < 1:
            raise UserError(f"{name} is {min(values)}, but it must be at least 1.")


def chosen(named: tuple[T, ...] | None, usual: tuple[T, ...]) -> tuple[T, ...]:
    """What was named, each once, or what is usual."""
    return tuple(dict.fromkeys(named or usual))


def rows(arguments: Arguments) -> Iterator[bench.Row]:
    """The figures that are asked for, as they are measured."""
    key_dims = chosen(arguments.key_dims, (4, 16) if arguments.tpu is None else (8,))
    everywhere = (Form.RECURRENT, Form.DUAL) if arguments.tpu is None else tuple(Form)
    subjects = chosen(arguments.modes, tuple(Backward)), chosen(arguments.forms, everywhere), key_dims
    chip = None if arguments.tpu is None else tpu_chip(arguments.tpu)
    match arguments.what:
        case What.MEMORY:
            return bench.memory_rows(chip, *subjects, arguments.depths or ((6, 12, 24) if chip is None else (24,)))
        case What.TRAFFIC:
            return bench.traffic_rows(chip, *subjects, chosen(arguments.dtypes, tuple(ComputeType)))
        case What.STEP:
            return bench.step_rows(*subjects, arguments.step_depth, arguments.repetitions or 10)
        case What.COMPILE:
            return bench.compile_rows(*subjects, arguments.repetitions or 2)
        case What.WRITE:
            return bench.write_rows(key_dims, arguments.repetitions or 10)
        case What.LOADER:
            return loader_rows(read_config(arguments.config or QUICKSTART), arguments.repetitions or 10)
        case What.GENERATE:
            return generation_rows(read_config(arguments.config or QUICKSTART), arguments.repetitions or 10)


def main() -> None:
    """Parses and measures."""
    arguments = parse(Arguments)
    check(arguments)
    for file in (arguments.json, arguments.plot):
        if file is not None and not os.access(file.parent, os.W_OK):
            raise UserError(f"{file} cannot be written: {file.parent} is no folder that takes files.")
    if arguments.plot is not None:
        require_matplotlib()
    if arguments.tpu is not None:
        jax.config.update("jax_platforms", "cpu")
    if arguments.tpu is not None or arguments.what is What.COMPILE:  # programs for no device of ours can't be read back
        jax.config.update("jax_enable_compilation_cache", False)
    found = print_rows(rows(arguments), TITLES[arguments.what])
    if arguments.json is not None:
        write_rows(found, arguments.json)
    if arguments.plot is not None:
        plot_memory([row for row in found if row.what == "temporary_bytes"], arguments.plot)


if __name__ == "__main__":
    run_script(main)
