"""What a depth memory costs beside PreLN: `python scripts/bench.py memory|traffic|step|compile|write [--json FILE]`."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from ldm_jax.cli import parse, run_script
from ldm_jax.config import ComputeType
from ldm_jax.errors import UserError
from ldm_jax.memory import Backward
from ldm_jax.mixers import Form
from ldm_jax.report import bench
from ldm_jax.report.bench_table import plot_memory, print_rows, write_rows
from ldm_jax.report.compiled import this_machine, tpu


class What(enum.StrEnum):
    """What is measured."""

    MEMORY = "memory"
    TRAFFIC = "traffic"
    STEP = "step"
    COMPILE = "compile"
    WRITE = "write"


TITLES = {
    What.MEMORY: "Temporary memory of loss and gradient, compiled",
    What.TRAFFIC: "Main memory traffic and flops of loss and gradient, per block; attention is a token-local stand-in",
    What.STEP: "Seconds of a training step, the mixers taking turns, median",
    What.COMPILE: "Seconds to trace and compile loss and gradient",
    What.WRITE: "Seconds of one write, and of one copy of the same bytes, median",
}


@dataclass(frozen=True)
class Arguments:
    """Measures LDM beside PreLN, prints a table, and writes the figures as JSON if asked to."""

    what: tyro.conf.Positional[What]
    """memory: compiled temporary memory. traffic: bytes and flops per block on a TPU chip. step: seconds of a training
    step. compile: seconds to compile. write: one write against a copy of its bytes."""
    json: Path | None = None
    """File for the figures."""
    plot: Path | None = None
    """Picture of memory against depth (memory)."""
    tpu: str | None = None
    """A TPU slice such as v5e:2x2, for a chip of which memory and traffic are compiled; no TPU is needed."""
    key_dims: tuple[int, ...] | None = None
    """K. None: 4 and 16, for a TPU 8."""
    ways: tuple[Backward, ...] = tuple(Backward)
    """What the backward pass has."""
    forms: tuple[Form, ...] = tuple(Form)
    """Forms of the memory."""
    dtypes: tuple[ComputeType, ...] = tuple(ComputeType)
    """Compute types (traffic)."""
    depths: tuple[int, ...] | None = None
    """Blocks (memory; the slope is between the last two). None: 6, 12 and 24, for a TPU 24."""
    step_depth: int = 4
    """Blocks (step)."""
    repetitions: int = 10
    """Rounds (step, write)."""


def rows(arguments: Arguments) -> Iterator[bench.Row]:
    """The figures that are asked for, as they are measured."""
    key_dims = arguments.key_dims or ((4, 16) if arguments.tpu is None else (8,))
    subjects = arguments.ways, arguments.forms, key_dims
    place = this_machine() if arguments.tpu is None else tpu(arguments.tpu)
    match arguments.what:
        case What.MEMORY:
            depths = arguments.depths or ((6, 12, 24) if arguments.tpu is None else (24,))
            return bench.memory_rows(place, *subjects, depths)
        case What.TRAFFIC:
            return bench.traffic_rows(place, *subjects, arguments.dtypes)
        case What.STEP:
            return bench.step_rows(*subjects, arguments.step_depth, arguments.repetitions)
        case What.COMPILE:
            return bench.compile_rows(place, *subjects)
        case What.WRITE:
            return bench.write_rows(key_dims, arguments.repetitions)


def main() -> None:
    """Parses and measures."""
    arguments = parse(Arguments)
    if arguments.tpu is not None:
        jax.config.update("jax_platforms", "cpu")
    if arguments.what is What.TRAFFIC and arguments.tpu is None:
        raise UserError("traffic is counted by the TPU compiler: add --tpu v5e:2x2 (pip install -e '.[tpu]').")
    found = print_rows(rows(arguments), TITLES[arguments.what])
    if arguments.json is not None:
        write_rows(found, arguments.json)
    if arguments.plot is not None:
        plot_memory([row for row in found if row.what == "temporary_bytes"], arguments.plot)


if __name__ == "__main__":
    run_script(main)
