"""Draws the loss curves of runs: `python scripts/plot.py RUN [RUN ...] --out curves.png`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.cli import parse, require_matplotlib, run_script


@dataclass(frozen=True)
class Arguments:
    """Draws training and validation loss of runs into one picture."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    out: Path = Path("curves.png")
    """The picture; its ending says which format."""


def main() -> None:
    """Parses and draws."""
    arguments = parse(Arguments)
    require_matplotlib()
    from ldm_jax.report.curves import plot_runs

    plot_runs(arguments.runs, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    run_script(main)
