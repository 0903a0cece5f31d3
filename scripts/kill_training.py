"""Kills a run again and again: `python scripts/kill_training.py configs/tiny.toml [--kills 50] [--out DIR]`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from kill_test import KillTest, histogram
from ldm_jax.config.command_line import parse, run_script


@dataclass(frozen=True)
class Arguments:
    """Compares a run that is killed at random moments with one that never is. Exit status 1: their bits differ."""

    config: tyro.conf.Positional[Path]
    """TOML file of the run; one that saves often."""
    kills: int = 50
    """In turn during startup, compilation, steps and saves."""
    seed: int = 0
    """Of the moments."""
    out: Path = Path("runs/kill_training")
    """Folder for both runs."""


def main() -> None:
    """Parses, kills and compares."""
    arguments = parse(Arguments)
    test = KillTest(Path(__file__).parent / "train.py", arguments.config, arguments.out)
    kills = test.run(arguments.kills, arguments.seed)
    print(f"\n{len(kills)} kills, by what they met:\n{histogram(kills)}")
    differences = test.differences()
    if differences:
        print(f"{len(differences)} differences: {', '.join(differences[:5])}")
        sys.exit(1)
    print("the final parameters are the same to the bit, and so are all losses")


if __name__ == "__main__":
    run_script(main)
