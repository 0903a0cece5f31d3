"""Trains methods at tuned learning rates over seeds and compares them.

`python scripts/compare.py CONFIG ... --out DIR` trains the runs that DIR does not have yet; `python scripts/compare.py
report DIR` only prints the table again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.compare.costs import update_costs
from ldm_jax.compare.results import BASELINE, check_baseline, report
from ldm_jax.compare.runs import read_runs
from ldm_jax.compare.sweep import Sweep, say_plan
from ldm_jax.config.command_line import override, parse, run_script, split_overrides
from ldm_jax.config.toml import read_methods
from ldm_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Trains each method at its best learning rate of the first seed, on all seeds; writes tables and plots.

    Flags of train.py that override the config, such as --train.steps 30, apply to all methods.
    """

    configs: tyro.conf.Positional[tuple[Path, ...]]
    """TOML files; each is a method, or several if it has tables [variants.NAME]. Or: report DIR."""
    out: Path
    """Directory of the comparison. Runs that it has already are not trained again."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; learning rates are tuned on the first."""
    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Grid of learning rates, extended where the best is at its edge. A single rate is not tuned."""
    jobs: int = 1
    """Number of runs at a time; they share the cores."""
    baseline: str = BASELINE
    """Method whose loss and step time the others are compared with."""
    dry_run: bool = False
    """Train nothing; print what would be trained, and about how long that takes."""


@dataclass(frozen=True)
class ReportArguments:
    """Prints the table of a comparison again."""

    directory: tyro.conf.Positional[Path]
    """Directory of the comparison."""
    baseline: str = BASELINE
    """Method whose loss and step time the others are compared with."""
    out: Path | None = None
    """Directory to write the tables and plots to; it may be that of the comparison. None: they are not written."""


def main() -> None:
    """Parses the arguments; trains and reports, or only reports."""
    if sys.argv[1:2] == ["report"]:
        again = parse(ReportArguments, sys.argv[2:])
        report(again.directory, again.baseline, again.out)
        return
    own, overrides = split_overrides(sys.argv[1:])
    arguments = parse(Arguments, own)
    for flag, instead in (("optimizer.learning", "learning-rates"), ("train.seed", "seeds")):
        if any(each.startswith(f"--{flag}") for each in overrides):
            raise UserError(f"--{flag} does not apply to a comparison: use --{instead}.")
    methods = {method: override(config, overrides) for method, config in read_methods(arguments.configs).items()}
    names = list(methods) + [run.method for run in read_runs(arguments.out / "runs.csv") if run.method not in methods]
    check_baseline(arguments.baseline, names)
    if arguments.baseline not in names:
        print(f"there is no method {arguments.baseline} to compare with: --baseline names another one")
    sweep = Sweep(arguments.out, Path(__file__).parent / "train.py", arguments.jobs)
    if arguments.dry_run:
        say_plan(sweep, methods, arguments.learning_rates, arguments.seeds)
        return
    sweep.tune_and_repeat(methods, arguments.learning_rates, arguments.seeds)
    update_costs(arguments.out, methods)
    report(arguments.out, arguments.baseline, arguments.out)


if __name__ == "__main__":
    run_script(main, "interrupted: finished runs are kept; the same command resumes the others.")
