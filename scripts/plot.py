"""Draws the curves of runs: `python scripts/plot.py RUN [RUN ...] --out curves.png`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.cli import parse, require_matplotlib, run_script


@dataclass(frozen=True)
class Arguments:
    """Draws loss, gradient norm, rate and speed of runs into one picture, and each run's depth memory into another."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    out: Path = Path("curves.png")
    """The picture of all; its ending says which format. Those of the memories are named after it and the run."""


def main() -> None:
    """Parses and draws."""
    arguments = parse(Arguments)
    require_matplotlib()
    from ldm_jax.report.curves import plot_memory, plot_runs

    plot_runs(arguments.runs, arguments.out)
    print(arguments.out)
    for run in arguments.runs:
        file = arguments.out.with_name(f"{arguments.out.stem}_memory_{run.name}{arguments.out.suffix}")
        if plot_memory(run, file):
            print(file)


if __name__ == "__main__":
    run_script(main)
