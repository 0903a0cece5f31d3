"""Draw the training curves of runs: `python scripts/plot.py RUN [RUN ...] --out curves.png`."""

from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Draws loss, gradient norm, rate and speed of runs in one picture, and each run's depth memory in another."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""
    out: Path = Path("curves.png")
    """Picture of the curves; its ending sets the format. Pictures of memories are named OUT_memory_RUN."""


def main() -> None:
    """Parses and draws."""
    arguments = parse(Arguments)
    require_matplotlib()
    if not arguments.runs:
        raise UserError("no run is given: give at least one directory of a run of scripts/train.py.")
    from ldm_jax.train.curves import distinct_names, plot_memory, plot_runs

    names = distinct_names(arguments.runs)
    plot_runs(arguments.runs, names, arguments.out)
    print(arguments.out)
    for run, name in zip(arguments.runs, names, strict=True):
        plain = name.replace("/", "_")
        file = arguments.out.with_name(f"{arguments.out.stem}_memory_{plain}{arguments.out.suffix}")
        if plot_memory(run, name, file):
            print(file)
        else:
            print(f"{run} has no figures of a depth memory (see log.memory_every)")


if __name__ == "__main__":
    run_script(main)
