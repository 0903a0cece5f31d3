"""Trains methods at tuned rates over seeds and compares them: `python scripts/compare.py CONFIG ... --out DIR`.

`python scripts/compare.py report DIR` makes the tables and pictures anew from what DIR holds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from ldm_jax.compare.results import BASELINE, check_baseline, report
from ldm_jax.compare.runs import stored_methods
from ldm_jax.compare.sweep import Sweep
from ldm_jax.config.command_line import parse, require_matplotlib, run_script
from ldm_jax.config.toml import read_methods


@dataclass(frozen=True)
class Arguments:
    """Trains what is missing, each method at its best learning rate on the first seed; writes tables and pictures."""

    configs: tyro.conf.Positional[tuple[Path, ...]]
    """TOML files, a method each; one with variants has several. Or: report DIR."""
    out: Path
    """Folder of the comparison; it goes on with what it holds."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; rates are tuned on the first."""
    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """The grid of rates, which grows where the best is at its edge. A single one is taken as it is."""
    jobs: int = 1
    """Runs at a time, which share the cores."""
    baseline: str = BASELINE
    """The method that the others' losses and step times are compared with."""


@dataclass(frozen=True)
class ReportArguments:
    """Makes the tables and pictures of a comparison anew."""

    folder: tyro.conf.Positional[Path]
    """Folder of the comparison."""
    baseline: str = BASELINE
    """The method that the others' losses and step times are compared with."""


def main() -> None:
    """Parses; trains and reports, or only reports."""
    require_matplotlib()
    if sys.argv[1:2] == ["report"]:
        again = parse(ReportArguments, sys.argv[2:])
        report(again.folder, stored_methods(again.folder), again.baseline)
        return
    arguments = parse(Arguments)
    methods = read_methods(arguments.configs)
    check_baseline(arguments.baseline, methods)
    if arguments.baseline not in methods:
        print(f"there is no method {arguments.baseline}: nothing is compared with it; --baseline names another one")
    sweep = Sweep(arguments.out, Path(__file__).parent / "train.py", arguments.jobs)
    sweep.tune_and_repeat(methods, arguments.learning_rates, arguments.seeds)
    report(arguments.out, methods, arguments.baseline)


if __name__ == "__main__":
    run_script(main, "interrupted: finished runs are kept, and the same command goes on with the others.")
