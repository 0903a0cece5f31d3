"""Measure the depth memory, the loader and generation: `python scripts/bench.py memory`, or step, loader, ..."""

import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import interruptible  # noqa: F401 (first)
import jax
import tyro

from ldm_jax.bench import training as bench
from ldm_jax.bench.table import Row, plot_memory, print_rows
from ldm_jax.bench.throughput import generation_rows, loader_rows
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
    """What to measure."""

    MEMORY = "memory"
    TRAFFIC = "traffic"
    STEP = "step"
    COMPILE = "compile"
    WRITE = "write"
    LOADER = "loader"
    GENERATE = "generate"


TITLES = {
    What.MEMORY: "Compiled temporary memory of loss and gradient",
    What.TRAFFIC: "HBM bytes and flops of loss and gradient, per block; a token-local stand-in replaces attention",
    What.STEP: "Median seconds of a training step; LDM alternates with PreLN",
    What.COMPILE: "Median seconds to trace and compile loss and gradient; the depths alternate",
    What.WRITE: "Median seconds of one write, and of one copy of the same bytes",
    What.LOADER: "Median tokens a second of the loader, and of the training step; the two alternate",
    What.GENERATE: "Median tokens a second of generation, with and without a cache; the two alternate",
}


@dataclass(frozen=True)
class Arguments:
    """Measures LDM against PreLN, the loader or generation, and prints a table."""

    what: tyro.conf.Positional[What]
    """memory: compiled temporary memory. traffic: HBM bytes and flops per block on a TPU chip. step: seconds of a
    training step. compile: seconds to compile. write: seconds of one write, and of a copy of the same bytes. loader:
    tokens a second of loading a config's data, and of training on it. generate: tokens a second of decoding with a
    config's model."""
    json: Path | None = None
    """JSON file to write the figures to, after each row. None: they are only printed."""
    plot: Path | None = None
    """Picture of memory against depth to write (memory). None: none is drawn."""
    tpu: str | None = None
    """TPU slice such as v5e:2x2 to compile for (memory, traffic); no TPU is needed. None: this machine."""
    key_dims: tuple[int, ...] | None = None
    """Key widths K. None: 4 and 16; with --tpu 8."""
    modes: tuple[Backward, ...] | None = None
    """Backward modes. None: all three."""
    forms: tuple[Form, ...] | None = None
    """Forms of the memory. fused requires --tpu. None: all that can run."""
    dtypes: tuple[ComputeType, ...] | None = None
    """Compute types (traffic). None: both."""
    depths: tuple[int, ...] | None = None
    """Numbers of blocks (memory; the slope is between the last two). None: 6, 12 and 24; with --tpu 24."""
    step_depth: int = 4
    """Number of blocks (step)."""
    repetitions: int | None = None
    """Measurements of each (step, compile, write, loader, generate). None: 10; for compile 2."""
    config: Path | None = None
    """Config of the data or the model (loader, generate). None: configs/quickstart.toml."""


def check(arguments: Arguments) -> None:
    """Raises UserError for invalid numbers and combinations."""
    if arguments.what is What.TRAFFIC and arguments.tpu is None:
        raise UserError("traffic needs the TPU compiler: add --tpu v5e:2x2 (pip install -e '.[tpu]').")
    if arguments.tpu is not None and arguments.what not in (What.MEMORY, What.TRAFFIC):
        raise UserError(f"{arguments.what} is measured on this machine: omit --tpu.")
    if arguments.plot is not None and (arguments.what is not What.MEMORY or arguments.tpu is not None):
        raise UserError("--plot draws memory on this machine only: omit --plot.")
    if arguments.tpu is None and Form.FUSED in (arguments.forms or ()):
        raise UserError("the form fused compiles for TPUs only: omit it from --forms, or add --tpu v5e:2x2.")
    here = What.MEMORY, What.TRAFFIC, What.STEP, What.COMPILE
    for name, measured in (
        ("depths", (What.MEMORY,)),
        ("dtypes", (What.TRAFFIC,)),
        ("modes", here),
        ("forms", here),
        ("config", (What.LOADER, What.GENERATE)),
    ):
        if getattr(arguments, name) is not None and arguments.what not in measured:
            raise UserError(f"{arguments.what} does not use {name}: omit --{name}.")
    for name in ("key_dims", "modes", "forms", "dtypes", "depths"):
        if getattr(arguments, name) == ():
            raise UserError(f"--{name.replace('_', '-')} is empty: give at least one value, or omit it.")
    depths = arguments.depths or (1,)
    if min(depths) < 1 or list(depths) != sorted(set(depths)):
        raise UserError(f"depths are {depths}, but they must be at least 1 and increase.")
    for name, values in (
        ("key_dims", arguments.key_dims or (1,)),
        ("step_depth", (arguments.step_depth,)),
        ("repetitions", (1 if arguments.repetitions is None else arguments.repetitions,)),
    ):
        if min(values) < 1:
            raise UserError(f"{name} is {min(values)}, but it must be at least 1.")


def chosen(given: tuple[T, ...] | None, default: tuple[T, ...]) -> tuple[T, ...]:
    """The given values without duplicates, or the default."""
    return tuple(dict.fromkeys(given or default))


def rows(arguments: Arguments) -> Iterator[Row]:
    """Yields the figures as they are measured."""
    key_dims = chosen(arguments.key_dims, (4, 16) if arguments.tpu is None else (8,))
    everywhere = (Form.RECURRENT, Form.DUAL) if arguments.tpu is None else tuple(Form)
    subjects = bench.subjects(chosen(arguments.modes, tuple(Backward)), chosen(arguments.forms, everywhere), key_dims)
    chip = None if arguments.tpu is None else tpu_chip(arguments.tpu)
    match arguments.what:
        case What.MEMORY:
            return bench.memory_rows(chip, subjects, arguments.depths or ((6, 12, 24) if chip is None else (24,)))
        case What.TRAFFIC:
            return bench.traffic_rows(chip, subjects, chosen(arguments.dtypes, tuple(ComputeType)))
        case What.STEP:
            return bench.step_rows(subjects, arguments.step_depth, arguments.repetitions or 10)
        case What.COMPILE:
            return bench.compile_rows(subjects, arguments.repetitions or 2)
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
    if (file := arguments.json) is not None and not os.access(file.parent, os.W_OK):
        raise UserError(f"{file} cannot be written: {file.parent} is not a writable directory.")
    if arguments.plot is not None:
        require_matplotlib()
        from ldm_jax.plots import check_picture

        check_picture(arguments.plot)
    if arguments.tpu is not None:
        jax.config.update("jax_platforms", "cpu")
    if arguments.tpu is not None or arguments.what is What.COMPILE:  # JAX cannot read back programs for absent devices
        jax.config.update("jax_enable_compilation_cache", False)
    found = print_rows(rows(arguments), TITLES[arguments.what], arguments.json)
    if arguments.plot is not None:
        plot_memory([row for row in found if row.what == "temporary_bytes"], arguments.plot)


if __name__ == "__main__":
    run_script(main)
